"""The settings of a training whose defaults depend on its model and encoder, as in the papers."""

from __future__ import annotations

from typing import Any

from fastqt.sentences.runs.encoders import ENCODERS

WORD_DIM = 300  # where no pre-trained word vectors have a width of their own
ADAMW_DECAY = 0.01  # torch's own

# By the model. Those that an encoder changes are in its record.
MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    "quickthoughts": {
        "batch_size": 400,
        "context_size": 1,
        "learning_rate": 5e-4,
        "max_length": 50,
        "clip": 5.0,
        "epochs": 1,
        "vocab_size": 50_000,
        "valid_every": 500,
    },
}
# The batch size and the clipping are of Kiros et al. (2015), the length is of their code; the vocabulary is
# also that with which Logeswaran and Lee compare the two models.
MODEL_DEFAULTS["skip-thoughts"] = MODEL_DEFAULTS["quickthoughts"] | {
    "batch_size": 128,
    "max_length": 30,
    "clip": 10.0,
    "vocab_size": 20_000,
}
MODEL_DEFAULTS["simcse"] = MODEL_DEFAULTS["quickthoughts"] | {
    "batch_size": 64,
    "max_length": 32,
    "valid_every": 125,
}
MODEL_DEFAULTS["mixcse"] = MODEL_DEFAULTS["simcse"]
# Documents are longer than sentences.
MODEL_DEFAULTS["pairs"] = MODEL_DEFAULTS["simcse"] | {"max_length": 128}
MODEL_DEFAULTS["gloss-bow"] = MODEL_DEFAULTS["quickthoughts"] | {
    "batch_size": 512,  # not given in the paper
    "learning_rate": 3e-4,
    "clip": 25.0,
    "epochs": 210,
}
MODEL_DEFAULTS["gloss-pos"] = MODEL_DEFAULTS["gloss-bow"]


def default_encoder(model: str) -> str:
    """The encoder of a model for which none is named."""
    return "gru" if model == "skip-thoughts" else "bow"


def defaults_of(model: str, encoder: str) -> dict[str, Any]:
    """The defaults of a model with an encoder, by the settings' names."""
    return {**MODEL_DEFAULTS[model], **ENCODERS[encoder].defaults.get(model, {})}
