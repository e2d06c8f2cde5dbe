"""fastqt mine: hard negatives from a corpus for pairs of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastqt.sentences.cli.command import Encoding
from fastqt.sentences.options.commands import MineOptions
from fastqt.sentences.options.option import option


@dataclass(frozen=True, kw_only=True)
class Mine(Encoding, MineOptions):
    """Each line of PAIRS is a query, a tab and its positive.

    Negatives are near to the query among the positives of other queries and the sentences of --corpus. What
    is written is read by train --model pairs and by train --model simcse.
    """

    title: ClassVar[str] = "find hard negatives for pairs of texts, to train on"

    pairs: tuple[str, ...] = option(help=".tsv files; - is standard input", file="PAIRS", positional=True)
    out: str = option(help="file to write", file="X.tsv")
    corpus: tuple[str, ...] = option((), "text files of further candidates", file="FILE", spaced=True)
    format: Literal["triplets", "tuples"] = option(
        "triplets", "a row for each negative, or for each pair that has all of its negatives"
    )

    def run(self) -> int:
        from fastqt.sentences.inference.mine import mine_pairs

        mined = mine_pairs(self.load(), self.pairs, self.corpus, self.out, self, format=self.format)
        print(f"{self.out}: {mined}")
        return 0
