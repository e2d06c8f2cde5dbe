"""fastqt index: an index of a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastqt.sentences.cli.command import AnyEncoding
from fastqt.sentences.options.commands import IndexOptions
from fastqt.sentences.options.option import option


@dataclass(frozen=True, kw_only=True)
class MakeIndex(AnyEncoding, IndexOptions):
    """The index holds the sentences too. Its recall is measured against an exact search."""

    title: ClassVar[str] = "make an index of a corpus, for searches in milliseconds"

    corpus: tuple[str, ...] = option(help="text files; - is standard input", file="CORPUS", positional=True)
    out: str = option(help="file to write", file="X.index")

    def run(self) -> int:
        from fastqt.sentences.inference.index import build_index

        print(f"{self.out}: {build_index(self.load_any(with_identity=True), self.corpus, self.out, self)}")
        return 0
