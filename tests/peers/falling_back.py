"""fastqt's losses for pytorch-metric-learning, with that library's own for what they refuse."""

from __future__ import annotations

from typing import Any

from fastqt.integrations import metric_learning


class NTXentLoss(metric_learning.NTXentLoss):
    def __init__(self, temperature: float = 0.07, **options: Any) -> None:
        super().__init__(temperature, fallback=True, **options)


class SupConLoss(metric_learning.SupConLoss):
    def __init__(self, temperature: float = 0.1, **options: Any) -> None:
        super().__init__(temperature, fallback=True, **options)
