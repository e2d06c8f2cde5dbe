"""fastqt embed: the vectors of sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastqt.sentences.cli.command import AnyEncoding
from fastqt.sentences.options.commands import EmbedOptions
from fastqt.sentences.options.option import option


@dataclass(frozen=True, kw_only=True)
class Embed(AnyEncoding, EmbedOptions):
    """Every line of INPUT gets a row, so that rows and lines agree; a blank line gets zeros."""

    title: ClassVar[str] = "turn sentences into vectors"

    input: str = option(
        help="text, one sentence per line; - is standard input", file="INPUT", positional=True
    )
    out: str = option(help="file to write: float32, one row per line of INPUT", file="X.npy")

    def run(self) -> int:
        from fastqt.sentences.inference.embed import write_vectors

        encoder = self.load_any()
        rows, width = write_vectors(encoder, self.input, self.out, normalize=not self.raw, side=self.side)
        print(f"{self.out}: {rows} x {width} float32")
        return 0
