"""The training objective of SimCSE and MixCSE: two views of each sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from fastqt.losses.mixcse import drawn_partners
from fastqt.metrics import view_figures
from fastqt.text import Batch, Sample
from fastqt.train.objectives import Measured, ShuffledObjective, group_options
from fastqt.train.ranks import Share


class ViewsObjective(ShuffledObjective):
    """SimCSE and MixCSE: find each sentence's second view among the second views of a batch."""

    def loss(self, batch: Batch | Sample, share: Share | None = None) -> tuple[Tensor, Measured]:
        """Computes the loss of a batch; arguments as of `Objective.loss`.

        Returns:
            The loss, as in `Objective.loss`; of this rank's sentences both views, (B, D) each, and the
            partners of their mixed negatives, (B,), as numbers of sentences of all ranks.
        """
        z1, z2 = self.model(batch.tokens.to(self.device), batch.lengths.to(self.device))
        module, options = self.model.loss, group_options(share)
        N = len(z1) if share is None else share.sentences
        if self.config.partner == "random":
            # Two generators of one seed: the loss draws with one, and the log has the same draw from another.
            seed = int(torch.randint(1 << 62, (), device="cpu"))
            first, second = (torch.Generator("cpu").manual_seed(seed) for _ in range(2))
            options["generator"] = first
            partners = drawn_partners(N, z1.device, second)
        else:
            partners = torch.arange(1, N + 1, device=z1.device) % N
        options |= module.function_options()
        # Metrics are of rank 0, whose sentences are the first of all ranks.
        return type(module).function(z1, z2, **options), (z1, z2, partners[: len(z1)])

    def measure(self, measured: Measured) -> dict[str, float]:
        z1, z2, partners = measured
        config = self.config
        mixes_unit_rows = config.model == "simcse" or config.form == "slides"
        return view_figures(z1, z2, mix=config.mix, partners=partners, mixes_unit_rows=mixes_unit_rows)

    @contextlib.contextmanager
    def _validation_mode(self) -> Iterator[None]:
        # Dropout stays on, because without it both views would be equal. A fixed seed gives the same dropout
        # masks in every validation, so that the validations of a training can be compared.
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(self.config.seed)
            yield
