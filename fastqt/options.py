"""The values that options of one name may have: for type checkers as types, and for checks as tuples.

Each alias is the one place that lists its values. The checks at run time take them from the alias, so that a
type checker and a call refuse the same values.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

Reduction: TypeAlias = Literal["mean", "sum", "none"]
"""How the losses of the rows become the loss that is returned."""
TargetReduction: TypeAlias = Literal["mean", "sum", "none", "mean_of_targets"]
"""A reduction where rows may lack targets."""
DiagonalMode: TypeAlias = Literal["zero", "exclude", "keep"]
"""What becomes of the cells (i, i) of the scores."""
MarginDiagonal: TypeAlias = Literal["exclude", "keep"]
"""The same of a loss that has no softmax."""
Similarity: TypeAlias = Literal["dot", "euclidean"]
MemoryMode: TypeAlias = Literal["fast", "low"]
Memory: TypeAlias = MemoryMode | int
"""A mode, or a number of bytes."""
Backend: TypeAlias = Literal["cpu", "cuda", "triton", "torch", "reference"]

Target: TypeAlias = Literal["sm_80", "sm_90", "sm_100"]
"""A kind of GPU that kernels are compiled for without one."""

MarginStrategy: TypeAlias = Literal["absolute", "relative"]
"""How a guide's threshold follows from the score of a pair."""
BlockNegatives: TypeAlias = Literal["shift", "complement", "random"]
"""The negatives of CURL's block loss."""

MixForm: TypeAlias = Literal["slides", "released"]
MixPartner: TypeAlias = Literal["next", "random"]
MixBlocks: TypeAlias = Literal["both", "candidates"]
MaskedCell: TypeAlias = Literal["zero", "exclude"]

Quantization: TypeAlias = Literal["int8", "binary"]
"""What the numbers of quantised embeddings are."""

Direction: TypeAlias = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
PartitionMode: TypeAlias = Literal["joint", "per_direction"]
HardnessMode: TypeAlias = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]

ShardSizes: TypeAlias = Literal["equal", "uneven"]
"""Whether the ranks of a group have equally many rows."""
Edges: TypeAlias = Literal["join", "cut"]
GroupGradients: TypeAlias = Literal["average", "sum"]
Exchange: TypeAlias = Literal["auto", "gather", "ring"]

RankCheck: TypeAlias = Literal["first", "always"]
"""Which calls of losses are compared between the ranks of a group."""

Recheck: TypeAlias = Literal["first", "always", "never"]
"""Which chunks of a cached batch are compared with what they were in the first pass."""

Device: TypeAlias = Literal["auto", "cpu", "cuda"]
"""Where a model computes."""
