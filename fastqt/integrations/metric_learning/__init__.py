"""fastqt's losses in place of those of the `pytorch-metric-learning` library (the extra `metric`).

They are subclasses of that library's own, whose signatures, reducers, regularizers and checks they keep.
"""

from fastqt.integrations.metric_learning.losses import NTXentLoss, SupConLoss
from fastqt.integrations.metric_learning.memory import CrossBatchMemory

__all__ = ["CrossBatchMemory", "NTXentLoss", "SupConLoss"]
