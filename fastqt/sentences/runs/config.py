"""The settings of a training, stored as the run's config.json, and the model kinds that it may name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

from fastqt._version import __version__
from fastqt.errors import InputError, one_line
from fastqt.sentences.json_text import NAMES, Digest, read_object, to_json
from fastqt.sentences.kinds import context, gloss, pairs, views
from fastqt.sentences.kinds.kind import Kind
from fastqt.sentences.options.option import check_options, option, options_of
from fastqt.sentences.options.training import TrainOptions

FORMAT = 1  # version of the format of config.json and of the checkpoint
LARGEST_FILE = 1 << 20  # bytes of a config.json
WORD_DIM = 300  # where no pre-trained word vectors have a width of their own
ADAMW_DECAY = 0.01  # torch's own

# The figures of metrics.jsonl that tell which model is the best.
DEV_MEASURE, LOSS_MEASURE = "dev_spearman", "validation_loss"

# A new kind has its options, its model and its entry in a module of fastqt/sentences/kinds, and its objective
# in one of fastqt/sentences/train. Here it stands among the entries, and its options among the bases below.
ENTRIES: tuple[Kind[Any], ...] = (*context.KINDS, *views.KINDS, *pairs.KINDS, *gloss.KINDS)
KINDS = {kind.name: kind for kind in ENTRIES}


@dataclass(frozen=True)
class TrainConfig(gloss.GlossPosOptions, pairs.PairsOptions, views.MixOptions, context.QuickThoughtsOptions):
    """The settings of a training, which go together; the help text of each option says what it is.

    `corpus` is paths of the text files and tables, which are read in this order. The defaults are those of
    each model's source.
    """

    title: ClassVar[str] = "model"

    model: str = option("quickthoughts", "what to train", choices=tuple(KINDS))

    def __post_init__(self) -> None:
        if not self.corpus:
            raise InputError("corpus: want at least one file, got none")
        check_options(self)
        self._take_defaults()
        self._check_foreign()
        _check_combination(self)
        self.kind.check_common(self)
        self.kind.check(self)

    @property
    def kind(self) -> Kind[Any]:
        """The entry of the model kind."""
        return KINDS[self.model]

    def _take_defaults(self) -> None:
        """Gives the options that have no value yet the defaults of the model kind and the encoder."""
        if self.encoder is None:
            object.__setattr__(self, "encoder", self.kind.default("encoder"))
        for name in options_of(self.kind.options):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.kind.default(name, self.encoder))
        if self.weight_decay is None:
            object.__setattr__(self, "weight_decay", ADAMW_DECAY if self.optimizer == "adamw" else 0.0)
        if self.vectors is None and self.word_dim is None:
            object.__setattr__(self, "word_dim", WORD_DIM)

    def _check_foreign(self) -> None:
        """Refuses the options of other model kinds than this one."""
        for name, each in options_of(TrainConfig).items():
            value = getattr(self, name)
            if self.kind.has(name) or name == "model":
                continue
            if value is None:
                object.__setattr__(self, name, each.default)
            elif value != each.default:
                owners = " or ".join(kind.name for kind in KINDS.values() if kind.has(name))
                raise InputError(f"{name}: want it with model {owners} alone, got {value!r:.100}")

    def to_json(self) -> str:
        """The settings as the text of config.json."""
        return to_json({"format": FORMAT, "fastqt": __version__, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def load(cls, path: Path, digest: Digest | None = None) -> TrainConfig:
        """Reads settings that `to_json` wrote to a config.json, whose bytes go into `digest` too."""
        try:
            values = read_object(path, most_bytes=LARGEST_FILE, digest=digest)
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
        if unknown := values.keys() - options_of(cls).keys():
            names = one_line(", ".join(map(repr, sorted(unknown))))
            raise InputError(f"{path} is not the config.json of a training run: unknown {names}")

        try:
            # As options, these have a default that depends on others; a run's file has their values.
            for name, each in options_of(cls).items():
                if each.varies and values.get(name, "") is None:
                    raise InputError(f"{name}: want {NAMES[each.kind]}, got None")
            config = cls(**{"corpus": None, **with_tuples(values)})
            if config.word_dim is None:
                raise InputError("word_dim: want an integer, got None")
            return config
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def check_resumes(self, stored: TrainConfig) -> None:
        """Checks that a run that was started with the settings `stored` can continue with these settings."""
        self._check_same_files(stored)
        self._check_same_end(stored)
        for name, each in options_of(TrainConfig).items():
            was, now = getattr(stored, name), getattr(self, name)
            if each.resume == "same":
                differs = was != now
            else:  # a file that is there may lie elsewhere, and others are as many as they were
                differs = each.resume == "move" and _files(was) != _files(now)
            if differs:
                raise InputError(f"cannot resume: {name} is {now!r}, but the run was started with {was!r}")

    def _check_same_files(self, stored: TrainConfig) -> None:
        """Checks that a corpus that was renamed is still read as it was: as rows, or as sentences."""
        if self.model == stored.model and self.reads_rows != stored.reads_rows:
            names = [", ".join(each.corpus) for each in (self, stored)]
            raise InputError(f"cannot resume: corpus: want names that end as in {names[1]}, got {names[0]}")

    def _check_same_end(self, stored: TrainConfig) -> None:
        """Checks that a training with a schedule is resumed towards the end that it was started with."""
        if stored.schedule == "constant" and not 0 < stored.warmup < 1:
            return  # the rate of a step does not depend on how many there are
        for name in ("epochs", "steps"):
            was, now = getattr(stored, name), getattr(self, name)
            if was != now:
                raise InputError(
                    f"cannot resume: {name} is {now!r}, but the run was started with {was!r}, and its "
                    f"learning rate follows a schedule over the whole training (schedule {stored.schedule}, "
                    f"warmup {stored.warmup:g})"
                )

    @property
    def reads_rows(self) -> bool:
        """Whether the corpus has rows of texts: pairs and triplets."""
        return self.kind.reads_rows(self)

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate differs between steps."""
        return self.schedule != "constant" or self.warmup > 0

    @property
    def measure_of_best(self) -> str | None:
        """The figure of a validation that tells which model is kept; None where it is the last one.

        Development pairs decide wherever there are some. Without them, a training that may stop early keeps
        the model with the lowest loss on its held-out text.
        """
        if self.dev is not None:
            return DEV_MEASURE
        return LOSS_MEASURE if self.early_stop is not None else None


def settings_of_file(path: str) -> dict[str, Any]:
    """The options in a JSON file, which are checked where they are used; a run's config.json is one."""
    try:
        values = read_object(path, most_bytes=LARGEST_FILE)
    except FileNotFoundError:
        raise InputError(f"config: no such file: {path}") from None
    values = {name.replace("-", "_"): value for name, value in values.items()}
    for name in ("fastqt", "format"):  # which version has written it
        values.pop(name, None)
    names = options_of(TrainConfig)
    for name in values:
        if name not in names:
            nearest = get_close_matches(name, names, n=1)
            hint = "".join(f"; did you mean {each}?" for each in nearest)
            raise InputError(f"{path}: unknown option {one_line(name, 100)!r}{hint}")
    return with_tuples(values)


def with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Settings that were read from JSON, which has lists where a setting is a tuple."""
    options = options_of(TrainConfig)
    return {
        name: tuple(value) if options[name].count != 1 and isinstance(value, list) else value
        for name, value in values.items()
    }


def _files(value: str | tuple[str, ...] | None) -> int | None:
    """How many files an option names; None for none."""
    return None if value is None else 1 if isinstance(value, str) else len(value)


def _check_combination(config: TrainOptions) -> None:
    """Checks that the options go with each other and with the encoder."""
    _check_vectors(config)
    _check_encoder(config)
    _check_vocabulary(config)
    _check_optimiser(config)


def _check_vectors(config: TrainOptions) -> None:
    """Refuses pre-trained word vectors that are needed and missing, or given where nothing can use them."""
    kind = config.encoder_kind
    if config.trained_dim is not None and not kind.channel:
        raise InputError(f"trained_dim: want it with an mc- encoder alone, got {config.trained_dim}")

    if config.vectors is None:
        for what, needs_vectors in (
            (f"encoder {config.encoder}", "vectors" in kind.needs),
            ("freeze_vectors", config.freeze_vectors),
            ("vectors_scale", config.vectors_scale != 1),
        ):
            if needs_vectors:
                raise InputError(f"vectors: want a file of word vectors with {what}, got None")
        return

    for where, has_no_words in (
        (f"encoder {config.encoder}", "checkpoint" in kind.needs),
        ("a vocabulary of a file", config.vocabulary is not None),
    ):
        if has_no_words:
            raise InputError(f"vectors: want none with {where}, got {config.vectors!r}")

    if config.freeze_vectors and (kind.is_table or kind.channel):
        reason = "has a frozen and a trained table" if kind.channel else "has no other weights"
        raise InputError(f"freeze_vectors: want none with encoder {config.encoder}, which {reason}")


def _check_encoder(config: TrainOptions) -> None:
    kind = config.encoder_kind
    if ("checkpoint" in kind.needs) != (config.checkpoint is not None):
        raise InputError(f"checkpoint: want with encoder huggingface alone, got {config.checkpoint!r}")
    if kind.has_heads and config.word_dim is not None and config.word_dim % config.heads:
        raise InputError(f"heads: want a divisor of word_dim {config.word_dim}, got {config.heads}")
    if kind.bidirectional and config.hidden_size % 2:
        raise InputError(f"hidden_size: want an even number for {config.encoder}, got {config.hidden_size}")


def _check_vocabulary(config: TrainOptions) -> None:
    if config.vocabulary is None and "vocabulary" in config.encoder_kind.needs:
        raise InputError(f"vocabulary: want a tokenizer.json with encoder {config.encoder}, got None")
    if config.vocabulary is not None and "checkpoint" in config.encoder_kind.needs:
        raise InputError(f"vocabulary: want none with encoder {config.encoder}, got {config.vocabulary!r}")


def _check_optimiser(config: TrainOptions) -> None:
    """Checks the options of the optimiser by themselves; which weights decay, only the model can tell."""
    if config.warmup >= 1 and config.warmup != int(config.warmup):
        raise InputError(
            f"warmup: want a whole number of steps, or a share of the training below 1, got {config.warmup:g}"
        )
    if config.early_stop is not None and config.valid is None and config.dev is None:
        raise InputError(
            f"early_stop: want it with dev or valid, whose figures tell when to stop, got {config.early_stop}"
        )
