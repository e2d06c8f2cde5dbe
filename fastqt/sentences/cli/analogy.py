"""fastqt analogy: A is to B as C is to which sentence of a pool?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastqt.sentences.cli.command import OfModel
from fastqt.sentences.options.option import option


@dataclass(frozen=True, kw_only=True)
class Analogy(OfModel):
    """A is to B as C is to the sentences of the pool with the highest cosine to C + B - A."""

    title: ClassVar[str] = "answer what C is to, as A is to B, by sentences of a pool"

    pool: tuple[str, ...] = option(help="text files; - is standard input", file="POOL", positional=True)
    a: str = option(help="the sentence A", flag="--a")
    b: str = option(help="the sentence B", flag="--b")
    c: str = option(help="the sentence C", flag="--c")
    k: int = option(5, "number of sentences", at_least=1)
    exclude: bool = option(False, "leave A, B and C out of the pool where they are in it")

    def run(self) -> int:
        from fastqt.sentences.inference.encoder import SentenceEncoder
        from fastqt.sentences.inference.search import answers

        encoder = SentenceEncoder.load(self.model, self.device)
        neighbors = answers(encoder, self.a, self.b, self.c, self.pool, self.k, exclude=self.exclude)
        print(f"{self.a} : {self.b} :: {self.c} :")
        for neighbor in neighbors:
            print(f"  {neighbor}")
        return 0
