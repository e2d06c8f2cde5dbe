"""Builds SimCSE and MixCSE as a run's settings describe them."""

from __future__ import annotations

from fastqt.nn import Encoder, MixCSE, SimCSE
from fastqt.runs.config import TrainConfig


def build_views_model(config: TrainConfig, encoder: Encoder) -> SimCSE:
    """SimCSE or MixCSE, whichever the settings name, around an encoder."""
    if config.model == "simcse":
        return SimCSE(
            encoder,
            dropout=config.dropout,
            scale=config.scale,
            hard_negative_weight=config.hard_negative_weight,
        )
    return MixCSE(
        encoder,
        dropout=config.dropout,
        scale=config.scale,
        mix=config.mix,
        form=config.form,
        partner=config.partner,
        stop_gradient=config.stop_gradient == "yes",
        blocks=config.blocks,
        masked_cell=config.masked_cell,
        hard_negative_weight=config.hard_negative_weight,
    )
