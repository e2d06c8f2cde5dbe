"""A training that begins with the weights and the vocabulary of an earlier run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fastqt.errors import InputError, one_line
from fastqt.sentences.errors import warn
from fastqt.sentences.options.option import options_of
from fastqt.sentences.options.training import EncoderOptions
from fastqt.sentences.runs.checkpoint import CONFIG, MODEL, load_weights, standing
from fastqt.sentences.runs.config import KINDS, TrainConfig
from fastqt.sentences.runs.lexicon import HUGGINGFACE, load_lexicon
from fastqt.sentences.runs.tensor_files import open_tensors
from fastqt.sentences.text import Lexicon

# Options of an encoder with which its weights are the same function of words, and those that name what a new
# model starts from.
CHANGEABLE = ("dropout", "checkpoint", "vectors", "vectors_scale", "freeze_vectors", "init", "init_from")
SAME = (*(name for name in options_of(EncoderOptions) if name not in CHANGEABLE), "unknown")
OF_WORDS = ("vocabulary", "vocab_size", "unknown", "max_length", "query_prompt", "document_prompt")


def settings_like(run: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """These settings with those of the encoder and the words of a run, where they have none of their own."""
    copy = str(Path(run, HUGGINGFACE))
    if settings.get("checkpoint") not in (None, copy):
        raise InputError(f"init_from: want none with checkpoint, got {run}")
    earlier = _settings_of(run)
    kind = KINDS[settings.get("model", earlier.model)]
    names = [name for name in (*options_of(EncoderOptions), *OF_WORDS, "model") if name != "init_from"]
    inherited = {name: getattr(earlier, name) for name in names if name == "model" or kind.has(name)}
    if earlier.checkpoint is not None:
        inherited["checkpoint"] = copy
    return {**inherited, **settings}


def lexicon_of(config: TrainConfig) -> Lexicon:
    """The vocabulary of the run that a training begins with, after a look at whether both go together."""
    run = _run(config)
    earlier = _settings_of(run)
    for name in SAME:
        wanted, value = getattr(earlier, name), getattr(config, name)
        if wanted != value:
            raise InputError(f"{name}: want {wanted!r} as {run} has it, got {value!r}")
    if (earlier.vocabulary is None) != (config.vocabulary is None):
        raise InputError(
            f"vocabulary: want {earlier.vocabulary!r} as {run} has it, got {config.vocabulary!r}"
        )
    if at := standing(Path(run), earlier):
        warn(f"{run}: this training has not ended: it stands at {at}")
    return load_lexicon(earlier, Path(run))[0]


def start_from_run(model: nn.Module, config: TrainConfig) -> None:
    """Gives a new model the weights of the run that its training begins with, in place."""
    run = _run(config)
    path = Path(run, MODEL)
    with open_tensors(path) as file:
        kept = [name for name in file.keys() if _is_kept(name)]  # noqa: SIM118  # no dict
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in kept}
        weights = {name: tensor for name, tensor in model.state_dict().items() if _is_kept(name)}
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        if different := dict(stored.items() ^ shapes.items()):
            names = one_line(", ".join(sorted(different)), 200)
            raise InputError(
                f"init_from: want a run whose weights are those of this model, got {run}, which differs in "
                f"{names}"
            )
        load_weights(file, path, weights)


def _is_kept(name: str) -> bool:
    """Whether a training begins with a weight of this name. A learnt scale begins with what is set for it."""
    return not name.startswith("loss.")


def _run(config: TrainConfig) -> str:
    assert config.init_from is not None  # for mypy: callers ask
    return config.init_from


def _settings_of(run: str) -> TrainConfig:
    if not Path(run).is_dir():
        raise InputError(f"init_from: want a directory that train wrote, got {run}")
    return TrainConfig.load(Path(run, CONFIG))
