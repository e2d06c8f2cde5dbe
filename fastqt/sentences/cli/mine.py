"""fastqt mine: hard negatives from a corpus for pairs of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastqt.sentences.cli.command import AnyEncoding
from fastqt.sentences.options.commands import MineOptions
from fastqt.sentences.options.option import option, options_of

LIMITS = ("range_max", "max_score", "min_score", "absolute_margin", "relative_margin")


@dataclass(frozen=True, kw_only=True)
class Mine(AnyEncoding, MineOptions):
    """Each line of PAIRS is a query, a tab and its positive, or a row of a table with columns of these names.

    Negatives are near to the query among the positives of other queries and the sentences of --corpus. What
    is written is read by train --model pairs and by train --model simcse.
    """

    title: ClassVar[str] = "find hard negatives for pairs of texts, to train on"

    pairs: tuple[str, ...] = option(
        help=".tsv, .csv, .jsonl or .parquet files; - is standard input", file="PAIRS", positional=True
    )
    out: str = option(help="file to write", file="X.tsv")
    corpus: tuple[str, ...] = option((), "text files of further candidates", file="FILE", spaced=True)
    format: Literal["tuples", "triplets"] = option(
        "tuples", "a row for each pair that has all of its negatives, or for each negative"
    )

    def run(self) -> int:
        from fastqt.sentences.inference.mine import mine_pairs

        mined = mine_pairs(self.load_any(), self.pairs, self.corpus, self.out, self, format=self.format)
        print(f"{self.out}: {mined}")
        if mined.short:
            print(self._advice())
        return 0

    def _advice(self) -> str:
        """Why queries have too few negatives, and what gives more."""
        values = {name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None}
        limits = ", ".join(f"{options_of(Mine)[name].flag} {value:g}" for name, value in values.items())
        where = f"after {limits}" if limits else "among so few documents"
        return (
            f"They have fewer than --negatives {self.negatives} {where}. Fewer negatives, weaker limits or a "
            "--corpus of more sentences give more rows."
        )
