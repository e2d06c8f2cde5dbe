"""fastqt's losses in the trainer of the `sentence_transformers` library (the extra `st`)."""

from fastqt.integrations.sentence_transformers.columns import CachedLoss, SentenceTransformerLoss

__all__ = ["CachedLoss", "SentenceTransformerLoss"]
