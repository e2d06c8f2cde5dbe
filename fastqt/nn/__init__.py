"""Sentence encoders, recurrent layers, models, and loss modules."""

from fastqt.nn.cached import CachedContrastive
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
from fastqt.nn.gloss_inference import Inference
from fastqt.nn.gru import GRU
from fastqt.nn.loss import (
    CLIPLoss,
    ContrastiveLoss,
    CURLBlockLoss,
    CURLLoss,
    GISTEmbedLoss,
    GlossBagOfWordsLoss,
    GlossPositionalLoss,
    InfoNCELoss,
    MaxMarginLoss,
    MixCSELoss,
    MultipleNegativesRankingLoss,
    NTXentLoss,
    SigLIPLoss,
    SigmoidLoss,
    SimCSELoss,
    SupConLoss,
)
from fastqt.nn.queue import Queue
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
    "CachedContrastive",
    "Combine",
    "ContrastiveLoss",
    "Encoder",
    "GISTEmbedLoss",
    "GRUEncoder",
    "Gloss",
    "GlossBagOfWordsLoss",
    "GlossPositionalLoss",
    "Inference",
    "InfoNCELoss",
    "LSTMEncoder",
    "MaxMarginLoss",
    "MixCSE",
    "MixCSELoss",
    "MultiChannel",
    "MultipleNegativesRankingLoss",
    "NTXentLoss",
    "Queue",
    "QuickThoughts",
    "SigLIPLoss",
    "SigmoidLoss",
    "SimCSE",
    "SimCSELoss",
    "SkipThoughts",
    "SupConLoss",
    "Transformer",
]
