"""What a training run is: one frozen dataclass, saved as the run's config.json and offered as options."""

from __future__ import annotations

import json
import math
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fastqt._version import __version__
from fastqt.errors import InputError

FORMAT = 1  # of config.json, and of the files that lie beside it
MODELS = ("quickthoughts", "simcse", "mixcse", "gloss-bow", "gloss-pos")
ENCODERS = ("bow", "gru", "bigru", "lstm", "bilstm", "transformer", "huggingface")

# What the sources train with: a model, and it with bags of words.
SOURCES: dict[str, dict[str, Any]] = {
    "quickthoughts": {
        "batch_size": 400,
        "context_size": 1,
        "learning_rate": 5e-4,
        "max_length": 50,
        "clip": 5.0,
        "epochs": 1,
    },
    "quickthoughts bow": {"batch_size": 1500, "context_size": 3},
}
SOURCES["simcse"] = SOURCES["quickthoughts"] | {"batch_size": 64, "max_length": 32}
SOURCES["mixcse"] = SOURCES["simcse"]
SOURCES["simcse huggingface"] = SOURCES["mixcse huggingface"] = {"learning_rate": 3e-5}
SOURCES["gloss-bow"] = SOURCES["quickthoughts"] | {
    "batch_size": 512,  # which the paper does not say
    "learning_rate": 3e-4,
    "clip": 25.0,
    "epochs": 210,
}
SOURCES["gloss-pos"] = SOURCES["gloss-bow"]


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    below: float = math.inf,
) -> Any:
    """A setting that is an option on the command line too; None is the source's choice, or none at all."""
    return field(
        default=default, metadata={"help": help, "choices": choices, "at_least": at_least, "below": below}
    )


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training. The defaults are those of the model's source: Logeswaran & Lee (2018) for
    QuickThoughts, Singh, Fan & Auli (2019) for GLOSS, the authors' code for SimCSE and MixCSE, but for a
    learning rate that suits encoders which begin from nothing.

    Raises:
        InputError: a value outside its range; the message names the field.
    """

    corpus: tuple[str, ...]  # files, read one after the other
    valid: str | None = option(None, "held-out text for validation")
    dev: str | None = option(
        None, "sentence pairs with gold scores, as STS-B's dev.tsv: keep the model that ranks them best"
    )
    model: str = option("quickthoughts", "what to learn from", choices=MODELS)
    encoder: str = option("bow", "sentence encoder", choices=ENCODERS)
    checkpoint: str | None = option(None, "of a huggingface encoder: a directory with model and tokenizer")
    pooling: str = option("cls", "of its tokens' states", choices=("cls", "cls_before_pooler", "mean"))
    word_dim: int = option(
        300, "width of word vectors (and of a bow, transformer or gloss sentence vector)", at_least=1
    )
    hidden_size: int = option(1000, "width of a gru or lstm sentence vector", at_least=1)
    layers: int = option(6, "of a transformer", at_least=1)
    heads: int = option(5, "of attention in each of them", at_least=1)
    feedforward: int = option(1000, "width of their inner layer", at_least=1)
    dropout: float = option(
        0.1, "in a transformer, and of the vectors of simcse and mixcse", at_least=0, below=1
    )
    cell: str = option(
        "reset-after", "gru cell: torch's, or the paper's", choices=("reset-after", "reset-before")
    )
    init: str = option("paper", "initialisation: the paper's, or torch's", choices=("paper", "torch"))
    batch_size: int = option(
        None, "sentences a batch (default: 400, for bow 1500; simcse, mixcse 64; gloss 512)", at_least=2
    )
    context_size: int = option(None, "sentences on each side to predict (default: 1, for bow 3)", at_least=1)
    scale: float = option(20.0, "inverse temperature of simcse and mixcse", at_least=0)
    mix: float = option(0.2, "share of a sentence's own positive in its mixed negative", at_least=0, below=1)
    form: str = option(
        "slides",
        "of mixcse: with a mixed negative a row, or the authors' code's 3 N columns",
        choices=("slides", "released"),
    )
    radius: float = option(2.0, "of the ball of gloss's latent vectors", at_least=1e-6)
    latents: str = option(
        "rows",
        "a step of gloss moves latent vectors: the batch's, or all by momentum",
        choices=("rows", "all"),
    )
    documents: str = option("cut", "context windows at document boundaries", choices=("cut", "cross"))
    vocab_size: int = option(50_000, "word types, <unk> among them", at_least=2)
    unknown: str = option("keep", "other words: kept as <unk>, or dropped", choices=("keep", "drop"))
    max_length: int = option(
        None, "words of a sentence that are used (default: 50; for simcse, mixcse 32)", at_least=1
    )
    learning_rate: float = option(
        None,
        "of Adam, constant (default: 5e-4; for gloss 3e-4; for simcse, mixcse of huggingface 3e-5)",
        at_least=0,
    )
    clip: float = option(
        None, "largest norm of the gradient; 0 for any (default: 5; for gloss 25)", at_least=0
    )
    clip_by: str = option(
        "global", "norm over all weights, or variable by variable", choices=("global", "variable")
    )
    epochs: int = option(None, "passes over the corpus (default: 1; for gloss 210)", at_least=1)
    steps: int | None = option(None, "stop after so many batches", at_least=1)
    seed: int = option(0, "of the initialisation", at_least=0)
    report_every: int = option(50, "steps between reports", at_least=1)
    valid_every: int = option(500, "steps between validations", at_least=1)
    valid_batches: int = option(10, "batches of the held-out text that are used", at_least=1)
    checkpoint_every: int = option(500, "steps between checkpoints", at_least=1)
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"))

    def __post_init__(self) -> None:
        for setting in fields(self):
            _check(setting, getattr(self, setting.name))
        if not self.corpus:
            raise InputError("corpus: wanted at least one file, got none")
        for name, value in (SOURCES[self.model] | SOURCES.get(f"{self.model} {self.encoder}", {})).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if (self.encoder == "huggingface") != (self.checkpoint is not None):
            raise InputError(f"checkpoint: wanted with encoder huggingface alone, got {self.checkpoint!r}")
        if self.encoder == "transformer" and self.word_dim % self.heads:
            raise InputError(f"heads: wanted a divisor of word_dim {self.word_dim}, got {self.heads}")
        if self.encoder.startswith("bi") and self.hidden_size % 2:
            raise InputError(f"hidden_size: wanted an even number for {self.encoder}, got {self.hidden_size}")
        if self.context_size >= self.batch_size:
            raise InputError(
                f"context_size: wanted less than batch_size {self.batch_size}, got {self.context_size}"
            )

    def to_json(self) -> str:
        """The text of config.json."""
        return json.dumps({"format": FORMAT, "fastqt": __version__, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def load(cls, path: Path) -> TrainConfig:
        """Reads config.json."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            written_by = values.pop("fastqt")
            if (number := values.pop("format")) != FORMAT:
                raise InputError(
                    f"{path} has format {number}, written by fastqt {written_by}; "
                    f"fastqt {__version__} reads format {FORMAT}"
                )
            return cls(corpus=tuple(values.pop("corpus")), **values)
        except FileNotFoundError:
            raise InputError(f"no trained model in {path.parent}: {path.name} is missing") from None
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not the config.json of a training run: {error}") from error

    def check_resumes(self, begun: TrainConfig) -> None:
        """Raises an InputError that names the first setting with which a begun run cannot go on."""
        for name in (setting.name for setting in fields(self) if setting.name not in FREE):
            was, now = getattr(begun, name), getattr(self, name)
            if was != now:
                raise InputError(f"cannot resume: {name} is {now!r}, but the run was begun with {was!r}")


# Where the text lies, how long to go on and how often to look do not change what a step computes.
FREE = {
    "corpus",
    "valid",
    "dev",
    "checkpoint",
    "epochs",
    "steps",
    "report_every",
    "valid_every",
    "valid_batches",
    "checkpoint_every",
    "device",
}


def _check(setting: Field[Any], value: Any) -> None:
    choices, at_least = setting.metadata.get("choices"), setting.metadata.get("at_least")
    if choices and value not in choices:
        raise InputError(f"{setting.name}: wanted one of {', '.join(choices)}, got {value!r}")
    below = setting.metadata.get("below", math.inf)
    if at_least is not None and value is not None and not (at_least <= value < below):
        limit = "" if below == math.inf else f" and less than {below}"
        raise InputError(f"{setting.name}: wanted at least {at_least}{limit}, got {value!r}")
