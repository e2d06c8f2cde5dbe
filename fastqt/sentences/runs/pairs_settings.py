"""What a training on pairs and triplets minimises: the losses of ranking, with their options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from fastqt.options import Direction, HardnessMode, MarginStrategy, PartitionMode
from fastqt.sentences.runs.settings import option

LOSSES = ("ranking", "gist", "distillation")
WIDEST = 1 << 24


@dataclass(frozen=True)
class PairsSettings:
    """The options of the model pairs; other models have none of them."""

    query_prompt: str = option("", "text in front of each query, such as 'query: ' (default: none)")
    document_prompt: str = option("", "text in front of each document, such as 'passage: ' (default: none)")
    loss: str = option(
        "ranking",
        "each query's positive among all documents of the batch (ranking), without those that the teacher "
        "finds nearer than the positive (gist), or the teacher's scores (distillation)",
        choices=LOSSES,
    )
    directions: tuple[str, ...] | None = option(
        None,
        "scores among which the positive is: some of query_to_doc, query_to_query, doc_to_query and "
        "doc_to_doc (default: query_to_doc; gist all but doc_to_query)",
        choices=get_args(Direction),
    )
    partition_mode: str = option(
        "joint",
        "one softmax over the scores of all directions, or one for each",
        choices=get_args(PartitionMode),
    )
    hardness_mode: str | None = option(
        None,
        "scores of queries with documents that are raised where they are high, by --hardness-strength",
        choices=get_args(HardnessMode),
    )
    hardness_strength: float = option(
        0.0, "how many times the cosine is added to such scores, often 5 to 9", at_least=0, below=1e38
    )
    matryoshka_dims: tuple[int, ...] | None = option(
        None,
        "widths to which vectors may be cut: the loss is the sum over all of them",
        at_least=1,
        below=WIDEST + 1,
    )
    matryoshka_weights: tuple[float, ...] | None = option(
        None, "weight of the loss of each of them (default: 1)", at_least=1e-6, below=1e38
    )
    false_negative_margin: float | None = option(
        None,
        "a document whose cosine is so much above that of the positive leaves the loss of ranking; 0.1 in "
        "Qwen3-Embedding",
        at_least=-1e6,
        below=1e6,
    )
    guide_margin: float = option(
        0.0,
        "how far below the teacher's cosine of the positive a document's has to be, to stay in the loss gist",
        at_least=-1e6,
        below=1e6,
    )
    margin_strategy: str = option(
        "absolute",
        "a margin is a difference of cosines (absolute), or a share of the positive's cosine (relative)",
        choices=get_args(MarginStrategy),
    )
    teacher: tuple[str, ...] | None = option(
        None,
        "vectors of another model for one column of the rows, .npy; given once for each column, that of the "
        "queries first",
    )
    teacher_weight: float | None = option(
        None,
        "weight of the loss of distillation beside that of --loss (default with a teacher: ranking 1, gist "
        "0)",
        at_least=0,
        below=1e38,
    )
    teacher_scale: float = option(20.0, "1 / temperature of the teacher's scores", at_least=1e-6, below=1e38)
