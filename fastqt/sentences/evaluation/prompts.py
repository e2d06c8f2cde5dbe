"""Tasks for a model whose texts begin with prompts: those of queries, or of documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastqt.sentences.evaluation.judged import JudgedSet
from fastqt.sentences.evaluation.tasks import Task
from fastqt.sentences.evaluation.vectors import Vectors
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.options.evaluation import EvaluationOptions


class PromptedEncode:
    """The function `encode` of a model with prompts: texts are encoded as queries.

    A retrieval set has documents too, so that the vector of a text depends on more than its words. `evaluate`
    therefore puts the prompts into the texts of tasks, and encodes these texts as they are, by `plain`.
    """

    def __init__(self, encoder: SentenceEncoder, *, normalize: bool) -> None:
        self.encoder, self.normalize = encoder, normalize

    def __call__(self, texts: list[str]) -> NDArray[np.float32]:
        return self.encoder.encode(texts, normalize=self.normalize)

    def plain(self, texts: list[str]) -> NDArray[np.float32]:
        """The vectors of texts that have their prompts already."""
        config = replace(self.encoder.config, query_prompt="", document_prompt="")
        return replace(self.encoder, config=config).encode(texts, normalize=self.normalize)

    def prompted(self, task: Task) -> Task:
        """A task whose texts begin with the prompts."""
        query, document = self.encoder.prompts
        if isinstance(task, JudgedSet):
            return replace(
                task,
                queries={name: query + text for name, text in task.queries.items()},
                documents={name: document + text for name, text in task.documents.items()},
            )
        return PromptedTask(task, query)


@dataclass(frozen=True)
class PromptedTask:
    """A task whose texts have a prompt in front where they are encoded, and nowhere else."""

    task: Task
    prompt: str

    def texts(self) -> Iterable[str]:
        return (self.prompt + text for text in self.task.texts())

    def check(self, options: EvaluationOptions) -> None:
        self.task.check(options)

    def evaluate(self, vectors: Vectors, options: EvaluationOptions) -> dict[str, Any]:
        return self.task.evaluate(_PromptedVectors(vectors, self.prompt), options)


class _PromptedVectors(Vectors):
    """The vectors of sentences by the sentences without their prompt."""

    def __init__(self, vectors: Vectors, prompt: str) -> None:
        super().__init__(vectors.texts, vectors.matrix)
        self.prompt = prompt

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return super().__call__([self.prompt + text for text in texts])
