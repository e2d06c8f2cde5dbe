"""How well sentences find their neighbours, and the file that the figures go to."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor

from fastqt.errors import InputError

ROWS = 256


@torch.no_grad()
def context_accuracy(
    queries: Tensor,  # (N, D)
    candidates: Tensor,  # (N, D)
) -> tuple[float, float]:
    """Forward and backward accuracy of a batch of consecutive sentences.

    Forward: the share of rows i < N−1 whose highest score is that of candidate i+1; backward: of rows
    i > 0 and candidate i−1. The score of a sentence with itself is replaced by 0, as in the loss. Chance
    is about 1/N. Scores are taken 256 rows at a time: O(256·N) memory. (Logeswaran & Lee 2018, code.)

    Returns:
        Two shares in [0, 1]; 0 for a single row.
    """
    N = len(queries)
    forward = backward = 0
    for begin in range(0, N, ROWS):
        rows = torch.arange(begin, min(begin + ROWS, N), device=queries.device)
        scores = queries[rows] @ candidates.T
        scores[rows - begin, rows] = 0
        best = scores.argmax(dim=1)
        forward += int((best == rows + 1).sum())
        backward += int((best == rows - 1).sum())
    pairs = max(N - 1, 1)
    return forward / pairs, backward / pairs


class MetricsLog:
    """metrics.jsonl: a JSON object a line, appended, and cut back to a known length on resuming."""

    def __init__(self, path: Path, length: int = 0) -> None:
        path.touch()
        self._file = path.open("r+", encoding="utf-8")
        if os.fstat(self._file.fileno()).st_size < length:
            self._file.close()
            raise InputError(f"cannot resume: {path} is shorter than it was at the last checkpoint")
        self._file.truncate(length)
        self._file.seek(length)

    def write(self, line: dict[str, float]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def sync(self) -> int:
        """Brings the lines to the disk; returns how many bytes there are."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()
