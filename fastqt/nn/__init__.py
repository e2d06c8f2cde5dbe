"""Sentence encoders, recurrent layers and models."""

from fastqt.nn.encoders import (
    LSTM,
    BagOfWords,
    Combine,
    Encoder,
    GRUEncoder,
    LSTMEncoder,
    MultiChannel,
)
from fastqt.nn.gru import GRU
from fastqt.nn.loss import ContrastiveLoss
from fastqt.nn.quickthoughts import QuickThoughts

__all__ = [
    "GRU",
    "LSTM",
    "BagOfWords",
    "Combine",
    "ContrastiveLoss",
    "Encoder",
    "GRUEncoder",
    "LSTMEncoder",
    "MultiChannel",
    "QuickThoughts",
]
