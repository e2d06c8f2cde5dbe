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
from fastqt.nn.gloss import Gloss
from fastqt.nn.gru import GRU
from fastqt.nn.loss import (
    CLIPLoss,
    ContrastiveLoss,
    CURLBlockLoss,
    CURLLoss,
    GlossBagOfWordsLoss,
    GlossPositionalLoss,
    InfoNCELoss,
    MixCSELoss,
    SigLIPLoss,
    SigmoidLoss,
    SimCSELoss,
)
from fastqt.nn.quickthoughts import QuickThoughts
from fastqt.nn.simcse import MixCSE, SimCSE
from fastqt.nn.skip_thoughts import SkipThoughts
from fastqt.nn.transformer import Transformer

__all__ = [
    "GRU",
    "LSTM",
    "BagOfWords",
    "CLIPLoss",
    "CURLBlockLoss",
    "CURLLoss",
    "Combine",
    "ContrastiveLoss",
    "Encoder",
    "GRUEncoder",
    "Gloss",
    "GlossBagOfWordsLoss",
    "GlossPositionalLoss",
    "InfoNCELoss",
    "LSTMEncoder",
    "MixCSE",
    "MixCSELoss",
    "MultiChannel",
    "QuickThoughts",
    "SigLIPLoss",
    "SigmoidLoss",
    "SimCSE",
    "SimCSELoss",
    "SkipThoughts",
    "Transformer",
]
