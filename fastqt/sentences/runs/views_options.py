"""What the settings of SimCSE and MixCSE may be together. Like the settings, it imports no torch."""

from __future__ import annotations

from fastqt.errors import InputError
from fastqt.sentences.runs.encoders import ENCODERS
from fastqt.sentences.runs.train_settings import TrainSettings

# The settings of MixCSE's loss with their defaults; those of the released form alone are the second part.
OF_MIXCSE = {"partner": "next", "stop_gradient": "yes"}
OF_RELEASED = {"blocks": "both", "masked_cell": "zero", "hard_negative_weight": 0.0}
LARGEST_SCALE = 100.0  # that of CLIP

# Files of rows, of which each is an anchor, its positive and any hard negatives, with tabs between them.
ROWS = (".tsv", ".tsv.gz", ".tsv.xz")


def reads_rows(config: TrainSettings) -> bool:
    """Whether a corpus has rows of texts: pairs and triplets. For SimCSE the endings of its files say so."""
    has_views = config.model in ("simcse", "mixcse")
    return config.model == "pairs" or (has_views and config.corpus[0].endswith(ROWS))


def check_views(config: TrainSettings) -> None:
    """Checks that the settings of SimCSE and MixCSE can be used together, and with the model."""
    _check_files(config)
    if config.masked_words and config.model not in ("simcse", "mixcse"):
        raise InputError(f"masked_words: want 0.0 with model {config.model}, got {config.masked_words}")
    if config.masked_words and not config.encoder_kind.has_states:
        those = " or ".join(kind.name for kind in ENCODERS.values() if kind.has_states)
        raise InputError(
            f"masked_words: want encoder {those}, which have a state for each word, got {config.encoder}"
        )
    _check_scale(config)
    defaults, where = OF_MIXCSE | OF_RELEASED, f"model {config.model}"
    if config.model == "mixcse":
        defaults, where = ({}, "") if config.form == "released" else (OF_RELEASED, "form slides of mixcse")
    elif config.model == "simcse" and reads_rows(config):
        defaults = {name: each for name, each in defaults.items() if name != "hard_negative_weight"}
    for name, default in defaults.items():
        if (value := getattr(config, name)) != default:
            raise InputError(f"{name}: want {default!r} with {where}, got {value!r}")


def _check_scale(config: TrainSettings) -> None:
    """Checks that a scale is learnt where there is one, and the limit of a learnt one."""
    if config.learn_scale and config.model not in ("simcse", "mixcse", "pairs"):
        raise InputError(f"learn_scale: want it with model simcse, mixcse or pairs alone, got {config.model}")
    if config.max_scale is not None and not config.learn_scale:
        raise InputError(f"max_scale: want it with learn_scale alone, got {config.max_scale:g}")
    if config.learn_scale and largest_scale(config) < config.scale:
        raise InputError(
            f"max_scale: want at least the scale {config.scale:g}, got {largest_scale(config):g}"
        )


def largest_scale(config: TrainSettings) -> float:
    """The most that a learnt scale may become."""
    return LARGEST_SCALE if config.max_scale is None else config.max_scale


def _check_files(config: TrainSettings) -> None:
    """Checks that all files have rows or none has."""
    if config.model not in ("simcse", "mixcse"):
        return
    wanted = f"{', '.join(ROWS[:2])} or {ROWS[2]}"
    others = [name for name in config.corpus if not name.endswith(ROWS)]
    if 0 < len(others) < len(config.corpus):
        raise InputError(f"corpus: want all files or none to end in {wanted}, got {others[0]!r} among others")
    if config.valid is not None and config.valid.endswith(ROWS) != reads_rows(config):
        kind = f"rows as the corpus has, a file that ends in {wanted}" if reads_rows(config) else "sentences"
        raise InputError(f"valid: want {kind}, got {config.valid!r}")


def check_width(config: TrainSettings, width: int) -> None:
    """Checks that the loss of a model can use rows of `width` columns."""
    if config.model == "mixcse" and width > 2:
        raise InputError(
            f"corpus: want rows of an anchor and a positive for mixcse, which mixes its own hard negatives, "
            f"got {width} columns"
        )
    if config.model == "simcse" and width == 2 and config.hard_negative_weight:
        raise InputError(
            "hard_negative_weight: want 0.0 for rows without hard negatives, "
            f"got {config.hard_negative_weight}"
        )


def check_same_files(config: TrainSettings, stored: TrainSettings) -> None:
    """Checks that a corpus that was renamed is still read as it was: as rows, or as sentences."""
    if reads_rows(config) != reads_rows(stored):
        names = [", ".join(each.corpus) for each in (config, stored)]
        raise InputError(f"cannot resume: corpus: want names that end as in {names[1]}, got {names[0]}")
