"""How much text a bag of words needs: QuickThoughts on shares of the corpus, in as many steps for each.

A share has whole chapters, spread evenly over the corpus: a chapter is taken where the sentences that were
taken before are less than their share of those that were read. A seed decides how many chapters at the
beginning are passed over, and the vectors that are drawn for words without a GloVe vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.papers.parts import expanded
from benchmarks.papers.plans import GLOVE, SEEDS
from benchmarks.papers.runs import ALL_TASKS, Options, Places, Run, perform, train
from fastqt.sentences.text import read_blocks

TABLE = "limited-text"
SHARES = (1, 3, 10, 30, 100)  # per cent
STEPS = 1300  # about one pass over the whole corpus
BATCH = 400
TASKS = ALL_TASKS
PASSED_OVER = 7  # chapters for each seed


@dataclass(frozen=True)
class LimitedText:
    """A training on a share of the corpus, and its evaluation.

    Attributes:
        share: in per cent.
        seed: of the training, and of the chapters.
        expanded: evaluate the model with the words of GloVe added to its vocabulary. A share has fewer words
            too, and this tells what the rest of a difference is.
        corpus: the whole text.
    """

    share: int
    seed: int
    expanded: bool = False
    corpus: str = "@data/corpus/train.txt.xz"

    @property
    def name(self) -> str:
        return f"{self.share}-seed{self.seed}{' expanded' if self.expanded else ''}"

    def run(self) -> Run:
        """The training. It ends after `STEPS` steps, however many passes over the text they are."""
        options: Options = {
            **{**GLOVE, "encoder": "bow", "batch-size": BATCH, "steps": STEPS, "seed": self.seed},
            "epochs": 200,  # more than the steps need
        }
        text = self.corpus if self.share == 100 else f"@work/{TABLE}/{self.share}-seed{self.seed}.txt"
        return Run(self.name, options, corpus=(text,), tasks=TASKS, folder=f"{self.share}-seed{self.seed}")

    def settings(self) -> dict[str, Any]:
        about = {"share": self.share, "of": self.corpus} | ({"expanded": True} if self.expanded else {})
        return {**self.run().settings(), **about}

    def perform(self, places: Places) -> dict[str, Any]:
        run = self.run()
        documents = list(_documents(places.resolve(self.corpus)))
        taken = (
            documents
            if self.share == 100
            else list(chosen(documents, self.share / 100, PASSED_OVER * self.seed))
        )

        if self.share < 100:
            path = Path(places.resolve(run.corpus[0]))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n\n".join("\n".join(document) for document in taken) + "\n", encoding="utf-8")

        text = {
            "chapters": len(taken),
            "sentences": sum(map(len, taken)),
            "words": len({word for document in taken for line in document for word in line.split()}),
        }

        if self.expanded:
            folder = places.work / TABLE / str(run.folder)
            train(run, folder, places)
            run = replace(run, train=None, encoder=str(expanded(folder, places)))
        return {**perform(TABLE, run, places), "settings": self.settings(), "text": text}


def plan() -> list[LimitedText]:
    """All shares, from each seed."""
    trainings = [LimitedText(share, seed) for seed in SEEDS for share in SHARES]
    return trainings + [LimitedText(share, SEEDS[0], expanded=True) for share in SHARES]


def chosen(documents: Iterable[list[str]], share: float, first: int) -> Iterator[list[str]]:
    """The documents that make up a share of a text.

    Args:
        documents: the sentences of each.
        share: from 0 to 1.
        first: number of documents at the beginning that are passed over.

    Yields:
        Documents of at most the share's sentences and one document.
    """
    read = taken = 0
    for number, document in enumerate(documents):
        read += len(document)
        if number >= first and taken < share * read:
            taken += len(document)
            yield document


def _documents(path: str) -> Iterator[list[str]]:
    lines = (
        line for block in read_blocks([path]) for line in zip(block.documents, block.sentences, strict=True)
    )
    for _, document in groupby(lines, key=lambda line: line[0]):
        yield [sentence for _, sentence in document]
