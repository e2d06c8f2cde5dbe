"""What comes before the first step: the directory of the run, and the corpus and its identity."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Literal, cast

from fastqt.errors import InputError
from fastqt.sentences.runs import checkpoint
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.files import PARTIAL, digest, own_directory
from fastqt.sentences.runs.lexicon import RUN_FILES, load_lexicon, load_tokenizer
from fastqt.sentences.runs.model import prompts_of
from fastqt.sentences.runs.progress import Progress, read_finished
from fastqt.sentences.text import Lexicon, Vocabulary, read_blocks, read_triplets
from fastqt.sentences.text.batches import split, too_short
from fastqt.sentences.text.reader import beside
from fastqt.sentences.text.tables import data_files, is_table
from fastqt.sentences.train.earlier_run import lexicon_of
from fastqt.sentences.train.objectives import Training


def prepare(
    config: TrainConfig,
    directory: Path,
    stored: TrainConfig | None,
    resume: bool,
    ranks: int,
    note: Callable[[str], None],
) -> Training:
    """Reads what a training starts from: its checkpoint, or else its corpus.

    `stored` is the settings of the run that is there, if it is to be resumed and there is one. `ranks` is how
    many processes train together, and `note` says what happens.
    """
    check_directory(directory, config, stored, resume)
    path = directory / checkpoint.CHECKPOINT
    progress: Progress | None = None
    begins: Literal["at a checkpoint", "at the end"] = "at a checkpoint"
    if resume and path.exists():
        progress = checkpoint.read_progress(path)
    elif resume:
        progress, begins = read_finished(directory), "at the end"

    corpus = list(config.corpus)
    if progress is None:
        note(f"reading {', '.join(corpus)} to build the vocabulary")
        vocabulary, progress = read_corpus(config, corpus, ranks)
        return Training(config, corpus, vocabulary, directory, progress)

    check_corpus(_files(config, corpus), progress)
    vocabulary, digest_of_vocabulary = load_lexicon(config, directory)
    if progress.vocabulary_digest != digest_of_vocabulary:
        raise InputError(
            f"cannot resume: the vocabulary in {directory} is not the one that the run was started with"
        )
    share_out(config, corpus, progress, ranks)
    return Training(config, corpus, vocabulary, directory, progress, begins=begins)


@contextlib.contextmanager
def own_run(directory: Path) -> Iterator[None]:
    """Holds the directory of a run, without what a training that was killed was writing there."""
    with own_directory(directory):
        for name in RUN_FILES:
            for partial in directory.glob(f"{glob.escape(name)}*{PARTIAL}"):
                partial.unlink()
        yield


def check_directory(directory: Path, config: TrainConfig, stored: TrainConfig | None, resume: bool) -> None:
    """Checks that a training may start in a directory, or continue there with these settings.

    A run writes its config.json first, so other files that have a run's names without it are not a run's.
    """
    names = [name for name in RUN_FILES if (directory / name).exists()]
    if names and not resume:
        raise InputError(f"{directory} already holds a run: resume it, or choose another directory")
    if stored is not None:
        config.check_resumes(stored)
    elif names:
        raise InputError(
            f"{directory} holds no run to resume, but a file of a run's name, {names[0]}: move it, or choose "
            "another directory"
        )


def read_corpus(config: TrainConfig, corpus: list[str], ranks: int) -> tuple[Lexicon, Progress]:
    """Reads the corpus once to count its sentences and to build the vocabulary.

    With a Hugging Face checkpoint the vocabulary is that of its tokenizer, with an earlier run to begin with
    that of the run, and a file with tokens may be given. In a corpus of pairs and triplets, rows are counted
    as sentences. Each of the `ranks` processes that train together needs the sentences of a batch.
    """
    if config.column is not None and not any(map(is_table, corpus)):
        raise InputError(
            "column: want a corpus of .parquet or .arrow files or folders of the datasets library"
        )
    if config.column is not None and config.reads_rows:
        raise InputError("column: want none for rows, whose columns go by names: query, positive, negative")
    sizes, digests = zip(*map(_identify, _files(config, corpus)), strict=True)
    progress = Progress(corpus_bytes=sizes, corpus_digests=digests)

    def sentences() -> Iterator[str]:
        if config.reads_rows:
            for rows in read_triplets(corpus):
                config.kind.check_columns(config, len(rows[0]))
                progress.sentences += len(rows)
                yield from chain.from_iterable(prompts_of(config).of_rows(rows))
            return
        for block in read_blocks(corpus, column=config.column):
            progress.sentences += len(block.sentences)
            yield from block.sentences

    vocabulary: Lexicon
    if config.init_from is not None or config.checkpoint is not None or config.vocabulary is not None:
        vocabulary = _given_vocabulary(config)
        for _ in sentences():
            pass
    else:
        vocabulary = Vocabulary.build(
            sentences(), config.vocab_size, unknown=config.unknown, max_length=config.max_length
        )
    if progress.sentences < ranks * config.batch_size:
        raise InputError(too_short(corpus, progress.sentences, config.batch_size, ranks))
    return vocabulary, progress


def _given_vocabulary(config: TrainConfig) -> Lexicon:
    if config.init_from is not None:
        return lexicon_of(config)
    if config.vocabulary is not None:
        return load_tokenizer(config, Path(config.vocabulary))
    from fastqt.integrations.huggingface import CheckpointVocabulary

    try:
        return CheckpointVocabulary.load(cast("str", config.checkpoint), max_length=config.max_length)
    except ImportError as error:
        raise InputError(str(error)) from error


def _files(config: TrainConfig, corpus: list[str]) -> list[str]:
    """The files whose contents have to stay the same: the corpus, and a teacher's vectors of its rows."""
    return [*corpus, *(config.teacher or ())]


def _identify(name: str) -> tuple[int, str]:
    """The size of a file of the corpus and the digest of its bytes, or those of all files of a folder."""
    try:
        if os.path.isdir(name):
            files = data_files(name)
            digests = "".join(f"{file.name}\0{digest(file)}\0" for file in files)
            return sum(os.stat(file).st_size for file in files), sha256(digests.encode()).hexdigest()
        return os.stat(name).st_size, digest(Path(name))
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}{beside(name)}") from None
    except ValueError as error:  # a name that no file can have
        raise InputError(f"cannot read {name!r}: {error}") from None


def check_corpus(corpus: list[str], progress: Progress) -> None:
    """Compares the files with those of the run's start."""
    sizes = progress.corpus_bytes
    identities = list(map(_identify, corpus))
    for name, (size, _), was in zip(corpus, identities, sizes, strict=True):
        if size != was:
            raise InputError(f"cannot resume: {name} has {size} bytes, but had {was} when the run started")
    digests = tuple(digest for _, digest in identities)
    for name, now, before in zip(corpus, digests, progress.corpus_digests, strict=True):
        if now != before:
            raise InputError(f"cannot resume: {name} has other contents than when the run started")


def check_same_settings(config: TrainConfig, of_first: TrainConfig) -> None:
    """Checks that a rank was started with the settings of rank 0."""
    for name in (each.name for each in fields(config) if each.name != "device"):
        ours, theirs = getattr(config, name), getattr(of_first, name)
        if ours != theirs:
            raise InputError(f"{name}: want {theirs!r} as on rank 0, got {ours!r}")


def share_out(config: TrainConfig, corpus: list[str], progress: Progress, ranks: int) -> None:
    """Divides what remains of an epoch among the ranks, if as many did not train before.

    The spans of `progress`, that of a checkpoint, are changed.
    """
    if len(progress.spans) not in (0, ranks):
        left = [span for spans in progress.spans for span in spans]
        progress.spans = split(corpus, left, ranks, config.column)
