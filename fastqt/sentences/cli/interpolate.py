"""fastqt interpolate: sentences between two sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastqt.sentences.cli.command import Encoding
from fastqt.sentences.options.option import option


@dataclass(frozen=True, kw_only=True)
class Interpolate(Encoding):
    """MODEL is a directory that train --model gloss-... wrote."""

    title: ClassVar[str] = "generate sentences between two sentences, with a GLOSS model"

    source: str = option(help="the first sentence", flag="--from")
    target: str = option(help="the last sentence", flag="--to")
    steps: int = option(4, "number of sentences between them", at_least=0)
    slerp: bool = option(False, "interpolate along an arc, not along a straight line")

    def run(self) -> int:
        from fastqt.sentences.inference.interpolate import sentences_between

        between = sentences_between(self.load(), self.source, self.target, steps=self.steps, slerp=self.slerp)
        for share, text in between:
            print(f"{share:.2f}  {text}")
        return 0
