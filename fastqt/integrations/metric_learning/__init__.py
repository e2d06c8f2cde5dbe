"""fastqt's losses in place of those of the `pytorch-metric-learning` library (the extra `metric`).

They are subclasses of that library's own, whose signatures, reducers, regularizers and checks they keep.
"""

from fastqt.integrations._libraries import load_library

load_library("pytorch_metric_learning")
from fastqt.integrations.metric_learning.losses import NTXentLoss, SupConLoss  # noqa: E402  # after the check
from fastqt.integrations.metric_learning.memory import CrossBatchMemory  # noqa: E402

__all__ = ["CrossBatchMemory", "NTXentLoss", "SupConLoss"]
