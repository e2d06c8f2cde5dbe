"""The settings of a training, which are also command-line options, each with its default and its range."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fastqt.errors import InputError
from fastqt.sentences.runs.data_settings import DataSettings
from fastqt.sentences.runs.defaults import ADAMW_DECAY, WORD_DIM, default_encoder, defaults_of
from fastqt.sentences.runs.loss_settings import LossSettings
from fastqt.sentences.runs.model_settings import ModelSettings
from fastqt.sentences.runs.optimisation_settings import OptimisationSettings
from fastqt.sentences.runs.pairs_settings import PairsSettings
from fastqt.sentences.runs.run_settings import RunSettings
from fastqt.sentences.runs.settings import check_setting

# The groups of the settings, each a class that declares its own, in the order in which --help shows them.
GROUPS = {
    "data": DataSettings,
    "model": ModelSettings,
    "loss": LossSettings,
    "pairs": PairsSettings,
    "optimisation": OptimisationSettings,
    "run": RunSettings,
}


# The fields of the last base come first.
@dataclass(frozen=True)
class TrainSettings(
    RunSettings, OptimisationSettings, PairsSettings, LossSettings, ModelSettings, DataSettings
):
    """The settings of a training, each within its range; `TrainConfig` checks that they go together.

    The defaults are those of each model's source. Only the learning rate of SimCSE and MixCSE differs: it
    suits encoders that are trained from scratch.

    Source: Logeswaran and Lee (2018) for QuickThoughts; Singh, Fan and Auli (2019) for GLOSS; the authors'
    code for SimCSE and MixCSE.
    """

    def __post_init__(self) -> None:
        for setting in fields(self):
            check_setting(setting, getattr(self, setting.name))
        if not self.corpus:
            raise InputError("corpus: want at least one file, got none")

        if self.encoder is None:
            object.__setattr__(self, "encoder", default_encoder(self.model))
        for name, value in defaults_of(self.model, self.encoder).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.weight_decay is None:
            object.__setattr__(self, "weight_decay", ADAMW_DECAY if self.optimizer == "adamw" else 0.0)
        if self.vectors is None and self.word_dim is None:
            object.__setattr__(self, "word_dim", WORD_DIM)
