"""fastqt expand: the words of pre-trained vectors for a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fastqt.sentences.cli.command import Command
from fastqt.sentences.options.option import option


@dataclass(frozen=True, kw_only=True)
class Expand(Command):
    """A copy of the model knows the words of the file too, by a linear map to the model's own vectors."""

    title: ClassVar[str] = "add the words of pre-trained vectors to a model"

    model: str = option(help="a directory that train wrote", file="MODEL", positional=True)
    vectors: str = option(
        help="a text file of word vectors, see --vectors of train", file="VECTORS", positional=True
    )
    out: str = option(help="directory for the new model", file="DIR")

    def run(self) -> int:
        from fastqt.sentences.inference.expand import add_words, check_holds_no_model
        from fastqt.sentences.text.vectors import read_vectors

        check_holds_no_model(Path(self.out))  # before the vectors are read
        words, table = read_vectors(self.vectors)
        print(f"{self.out}: {add_words(self.model, words, table, self.out)} words added")
        return 0
