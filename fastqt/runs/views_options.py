"""What the settings of SimCSE and MixCSE may be together. Like the settings, it imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastqt.errors import InputError

if TYPE_CHECKING:
    from fastqt.runs.config import TrainConfig

# The settings of MixCSE's loss with their defaults; those of the released form alone are the second part.
OF_MIXCSE = {"partner": "next", "stop_gradient": "yes"}
OF_RELEASED = {"blocks": "both", "masked_cell": "zero", "hard_negative_weight": 0.0}


def check_views(config: TrainConfig) -> None:
    """Checks that the settings of SimCSE and MixCSE can be used together, and with the model.

    Raises:
        InputError: a setting that this model or form does not have; the message names it.
    """
    defaults, where = OF_MIXCSE | OF_RELEASED, f"model {config.model}"
    if config.model == "mixcse":
        defaults, where = ({}, "") if config.form == "released" else (OF_RELEASED, "form slides of mixcse")
    for name, default in defaults.items():
        if (value := getattr(config, name)) != default:
            raise InputError(f"{name}: want {default!r} with {where}, got {value!r}")
