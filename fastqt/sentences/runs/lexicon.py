"""The files of a run, and how its vocabulary or tokenizer is stored, loaded, and told from others."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fastqt.errors import InputError, one_line
from fastqt.sentences.runs.checkpoint import (
    CHECKPOINT,
    CONFIG,
    METRICS,
    MODEL,
    VOCABULARY,
    write_text,
)
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.files import digest_of_folder
from fastqt.sentences.runs.progress import FINISHED
from fastqt.sentences.text import Lexicon, Vocabulary

if TYPE_CHECKING:
    from fastqt.integrations.huggingface import CheckpointVocabulary

HUGGINGFACE = "huggingface"  # subdirectory of a run: the configuration and the tokenizer of its checkpoint
# The files of a run. config.json is the first one that a training writes, and the last one is a folder.
RUN_FILES = (CONFIG, VOCABULARY, METRICS, MODEL, CHECKPOINT, FINISHED, HUGGINGFACE)


def load_lexicon(config: TrainConfig, directory: Path) -> tuple[Lexicon, str]:
    """Reads the vocabulary of a run, or the tokenizer of its checkpoint; and the digest of what was read."""
    if config.checkpoint is not None:
        from fastqt.integrations.huggingface import CheckpointVocabulary

        with damage_in_words(directory / HUGGINGFACE):
            lexicon = CheckpointVocabulary.load(directory / HUGGINGFACE, max_length=config.max_length)
        return lexicon, digest_of_folder(directory / HUGGINGFACE)
    sha256 = hashlib.sha256()
    length = None if config.vocabulary is None else config.max_length
    path = directory / VOCABULARY
    vocabulary = Vocabulary.load(path, unknown=config.unknown, max_length=length, digest=sha256)
    return vocabulary, sha256.hexdigest()


def load_tokenizer(config: TrainConfig, path: Path) -> Vocabulary:
    """Reads a file of the `tokenizers` library as a run's settings want it."""
    return Vocabulary.load(path, unknown=config.unknown, max_length=config.max_length)


@contextlib.contextmanager
def damage_in_words(directory: Path) -> Iterator[None]:
    """Makes an InputError of what the `transformers` library raises for damaged files: any type of error."""
    try:
        yield
    except (InputError, ImportError):
        raise
    except Exception as error:  # the library has no type of its own for damaged files
        raise InputError(f"{directory} holds no usable Hugging Face checkpoint: {one_line(error)}") from error


def save_lexicon(lexicon: Lexicon, directory: Path) -> str:
    """Writes a vocabulary or a tokenizer to a run's directory, for `load_lexicon`; returns its digest."""
    if isinstance(lexicon, Vocabulary):
        text = lexicon.to_json()
        write_text(directory / VOCABULARY, text)
        return hashlib.sha256(text.encode()).hexdigest()
    cast("CheckpointVocabulary", lexicon).save(directory / HUGGINGFACE)
    return digest_of_folder(directory / HUGGINGFACE)


def check_is_not_read(out: str | Path, inputs: Iterable[str | Path]) -> None:
    """Checks, before any work, that a file to write is none of those that are read, nor of a run that is."""
    if not Path(out).is_file():
        return
    for path in map(Path, inputs):
        of_run = [path / name for name in RUN_FILES] + list((path / HUGGINGFACE).glob("*"))
        for file in of_run if path.is_dir() else [path]:
            if file.is_file() and os.path.samefile(file, out):
                raise InputError(f"cannot write {out}: {file} is read, and would be lost; want another name")
