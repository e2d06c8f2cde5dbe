"""The settings of a training, stored as the run's config.json.

They are declared in train_settings.py, and combinations.py says which of them go together.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fastqt._version import __version__
from fastqt.errors import InputError, one_line
from fastqt.sentences.json_text import read_object, to_json
from fastqt.sentences.runs.combinations import check_combination
from fastqt.sentences.runs.optimiser_options import check_same_end
from fastqt.sentences.runs.pairs_options import check_same_teacher
from fastqt.sentences.runs.train_settings import TrainSettings
from fastqt.sentences.runs.views_options import check_same_files

FORMAT = 1  # version of the format of config.json and of the checkpoint
LARGEST_FILE = 1 << 20  # bytes of a config.json


@dataclass(frozen=True)
class TrainConfig(TrainSettings):
    """The settings of a training, which go together; the help text of each option says what it is.

    `corpus` is paths of the text files and tables, which are read in this order.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_combination(self)

    def to_json(self) -> str:
        """The settings as the text of config.json."""
        return to_json({"format": FORMAT, "fastqt": __version__, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def load(cls, path: Path) -> TrainConfig:
        """Reads settings that `to_json` wrote to the config.json of a run."""
        try:
            values = read_object(path, most_bytes=LARGEST_FILE)
        except FileNotFoundError:
            raise InputError(f"no trained model in {path.parent}: {path.name} is missing") from None

        written_by, number = values.pop("fastqt", None), values.pop("format", None)
        if number is not None and (number != FORMAT or isinstance(number, bool)):
            raise InputError(
                f"{path} has format {number!r:.100}, written by fastqt {one_line(written_by)}; "
                f"fastqt {__version__} reads format {FORMAT}"
            )

        if missing := [name for name, value in (("format", number), ("fastqt", written_by)) if value is None]:
            raise InputError(f"{path} is not the config.json of a training run: {missing[0]} is missing")
        if unknown := values.keys() - {setting.name for setting in fields(cls)}:
            names = one_line(", ".join(map(repr, sorted(unknown))))
            raise InputError(f"{path} is not the config.json of a training run: unknown {names}")

        values = with_tuples(values)
        corpus = values.pop("corpus", None)
        if values.get("encoder", "") is None:  # as an option it has a default that depends on the model
            raise InputError(f"{path}: encoder: want a text, got None")

        try:
            config = cls(corpus=corpus, **values)
            if config.word_dim is None:
                raise InputError("word_dim: want an integer, got None")
            return config
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def check_resumes(self, stored: TrainConfig) -> None:
        """Checks that a run that was started with the settings `stored` can continue with these settings."""
        check_same_files(self, stored)
        check_same_end(self, stored)
        check_same_teacher(self, stored)
        for name in (setting.name for setting in fields(self) if setting.name not in CHANGEABLE_ON_RESUME):
            was, now = getattr(stored, name), getattr(self, name)
            if was != now:
                raise InputError(f"cannot resume: {name} is {now!r}, but the run was started with {was!r}")
        if (self.vectors is None) != (stored.vectors is None):
            raise InputError(
                f"cannot resume: vectors is {self.vectors!r}, but the run was started with {stored.vectors!r}"
            )


def with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Settings that were read from JSON, which has lists where a setting is a tuple."""
    tuples = {setting.name for setting in fields(TrainConfig) if str(setting.type).startswith("tuple")}
    return {
        name: tuple(value) if name in tuples and isinstance(value, list) else value
        for name, value in values.items()
    }


# Of these settings only the place of the files may change when a run is resumed: their contents are compared
# with those of the run's start, or the run has a copy, which is the one that is used.
MOVABLE = {"corpus", "teacher", "checkpoint", "vectors", "vocabulary"}

# These settings do not change what a step computes, so a resumed run may change them.
CHANGEABLE_ON_RESUME = MOVABLE | {
    "valid",
    "dev",
    "epochs",
    "steps",
    "early_stop",
    "report_every",
    "valid_every",
    "valid_batches",
    "checkpoint_every",
    "keep_checkpoint",
    "device",
    "compile",
    "timeout",
}
