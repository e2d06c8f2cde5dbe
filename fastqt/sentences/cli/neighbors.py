"""fastqt neighbors: the nearest sentences of a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastqt.errors import InputError
from fastqt.sentences.cli.command import AnyEncoding
from fastqt.sentences.options.option import option


@dataclass(frozen=True, kw_only=True)
class Neighbors(AnyEncoding):
    """The corpus is CORPUS, or that of --index."""

    title: ClassVar[str] = "find the nearest sentences of a corpus"

    corpus: tuple[str, ...] = option((), "text files; - is standard input", file="CORPUS", positional=True)
    index: str | None = option(None, "a file that index wrote", file="X.index")
    query: tuple[str, ...] = option(help="a sentence; may be repeated", repeats=True)
    k: int = option(5, "number of sentences per query", at_least=1)

    def run(self) -> int:
        from fastqt.sentences.inference.index import Index
        from fastqt.sentences.inference.search import nearest

        if bool(self.corpus) == (self.index is not None):
            raise InputError("want CORPUS or --index" + (", got both" if self.corpus else ", got none"))
        encoder = self.load_any(with_identity=self.index is not None)
        if self.index is None:
            neighbors = nearest(encoder, self.query, self.corpus, self.k)
        else:
            neighbors = Index(self.index).search(encoder, self.query, self.k)
        for text, answers in zip(self.query, neighbors, strict=True):
            print(text)
            for neighbor in answers:
                print(f"  {neighbor}")
        return 0
