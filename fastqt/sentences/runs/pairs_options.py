"""What the settings of the model pairs may be together. Like the settings, it imports no torch."""

from __future__ import annotations

from dataclasses import fields

from fastqt.errors import InputError
from fastqt.sentences.runs.pairs_settings import PairsSettings
from fastqt.sentences.runs.train_settings import TrainSettings

# The settings that each loss has, beside those of the texts.
OF_TEXTS = {"query_prompt", "document_prompt", "loss"}
OF_TEACHER = {"teacher", "teacher_weight", "teacher_scale"}
OF_RANKING = {
    "directions",
    "partition_mode",
    "hardness_mode",
    "hardness_strength",
    "matryoshka_dims",
    "matryoshka_weights",
    "false_negative_margin",
    "margin_strategy",
}
OF_LOSS = {
    "ranking": OF_RANKING | OF_TEACHER,
    "gist": {"directions", "guide_margin", "margin_strategy"} | OF_TEACHER,
    "distillation": {"teacher", "teacher_scale"},
}
WITHOUT_POSITIVES = {"query_to_query", "doc_to_doc"}


def check_pairs(config: TrainSettings) -> None:
    """Checks that the settings of pairs go with the model, with the loss, and with each other."""
    is_pairs = config.model == "pairs"
    known = OF_TEXTS | OF_LOSS[config.loss] if is_pairs else set()
    where = f"loss {config.loss} of pairs" if is_pairs else f"model {config.model}"
    for setting in fields(PairsSettings):
        value = getattr(config, setting.name)
        if setting.name not in known and value != setting.default:
            raise InputError(f"{setting.name}: want {setting.default!r} with {where}, got {value!r:.100}")
    if not is_pairs:
        return

    for name in ("query_prompt", "document_prompt"):
        _check_prompt(name, getattr(config, name))
    _check_directions(config)
    _check_hardness(config)

    if config.matryoshka_weights is not None and config.matryoshka_dims is None:
        raise InputError(f"matryoshka_weights: want matryoshka_dims too, got {config.matryoshka_weights}")

    has_margin = config.false_negative_margin is not None or config.guide_margin != 0
    if config.margin_strategy != "absolute" and not has_margin:
        margin = "guide_margin" if config.loss == "gist" else "false_negative_margin"
        raise InputError(f"margin_strategy: want it with a {margin} alone, got {config.margin_strategy!r}")

    _check_teacher(config)


def _check_prompt(name: str, prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InputError(f"{name}: want UTF-8, got {prompt!r:.100}") from None


def _check_directions(config: TrainSettings) -> None:
    directions = config.directions or ("query_to_doc",)
    if "query_to_doc" not in directions:
        raise InputError(f"directions: want query_to_doc among them, got {', '.join(directions)}")
    if config.loss == "gist" and "doc_to_query" in directions:
        raise InputError("directions: want no doc_to_query with loss gist, got it among them")
    without = sorted(WITHOUT_POSITIVES.intersection(directions))
    if config.partition_mode == "per_direction" and without:
        raise InputError(
            f"partition_mode: want joint with {without[0]}, whose scores do not contain the positive, got "
            "per_direction"
        )


def _check_hardness(config: TrainSettings) -> None:
    if (config.hardness_mode is None) != (config.hardness_strength == 0):
        raise InputError(
            f"hardness_strength: want a number above 0 with a hardness_mode, and 0 without, got "
            f"{config.hardness_strength:g} with {config.hardness_mode}"
        )


def _check_teacher(config: TrainSettings) -> None:
    if config.teacher is None:
        if config.loss != "ranking":
            raise InputError(f"teacher: want .npy files with loss {config.loss}, got None")
        if config.teacher_weight is not None:
            raise InputError(f"teacher_weight: want it with a teacher alone, got {config.teacher_weight:g}")
    elif config.loss == "ranking" and not distillation_weight(config):
        raise InputError(f"teacher_weight: want more than 0 with loss ranking, got {config.teacher_weight:g}")

    is_scaled = config.loss == "distillation" or distillation_weight(config) > 0
    if not is_scaled and config.teacher_scale != PairsSettings.teacher_scale:
        raise InputError(
            f"teacher_scale: want it with a teacher whose scores are learnt, got {config.teacher_scale:g}"
        )


def distillation_weight(config: TrainSettings) -> float:
    """The weight of the loss of distillation beside that of ranking or gist."""
    if config.teacher is None or config.loss == "distillation":
        return 0.0
    if config.teacher_weight is None:
        return 1.0 if config.loss == "ranking" else 0.0
    return config.teacher_weight


def check_columns(config: TrainSettings, columns: int) -> None:
    """Checks that the loss of pairs can use rows of so many columns; other models have no such settings."""
    if config.hardness_mode == "hard_negatives" and columns == 2:
        raise InputError("hardness_mode: want another than hard_negatives for rows without hard negatives")
    if config.teacher is not None and len(config.teacher) != columns:
        raise InputError(
            f"teacher: want a file for each of the {columns} columns of the corpus, got {len(config.teacher)}"
        )


def check_same_teacher(config: TrainSettings, stored: TrainSettings) -> None:
    """Checks that a training is resumed with a teacher if it was started with one, of as many files."""
    now, was = config.teacher or (), stored.teacher or ()
    if len(now) != len(was):
        raise InputError(
            f"cannot resume: teacher is {config.teacher!r}, but the run was started with {stored.teacher!r}"
        )
