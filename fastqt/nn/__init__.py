"""Sentence encoders, recurrent layers, models, and loss modules."""

from fastqt.nn.cached import CachedContrastive
from fastqt.nn.combine import Combine, MultiChannel
from fastqt.nn.encoders import (
    LSTM,
    BagOfWords,
    Encoder,
    GRUEncoder,
    LSTMEncoder,
)
from fastqt.nn.gloss import Gloss
from fastqt.nn.gloss_inference import Inference
from fastqt.nn.gru import GRU
from fastqt.nn.losses import (
    AnglELoss,
    ArcFaceLoss,
    BinaryWindowLoss,
    CLIPLoss,
    ContrastiveLoss,
    CoSENTLoss,
    CosFaceLoss,
    CURLBlockLoss,
    CURLLoss,
    DCLLoss,
    DistillationLoss,
    FlopsLoss,
    GISTEmbedLoss,
    GlossBagOfWordsLoss,
    GlossPositionalLoss,
    HCLLoss,
    InfoNCELoss,
    LSEPLoss,
    MarginMSELoss,
    MaxMarginLoss,
    MaxSimLoss,
    MixCSELoss,
    MultipleNegativesRankingLoss,
    NegativeSamplingLoss,
    NTXentLoss,
    ScoreDistillationLoss,
    SigLIPLoss,
    SigmoidLoss,
    SimCSELoss,
    SimilarityDistillationLoss,
    SpreadOutLoss,
    SupConLoss,
)
from fastqt.nn.masked_words import MaskedWordHead, mask_words
from fastqt.nn.queue import Queue
from fastqt.nn.quickthoughts import CombinedQuickThoughts, QuickThoughts
from fastqt.nn.simcse import MixCSE, SimCSE
from fastqt.nn.skip_thoughts import SkipThoughts
from fastqt.nn.splade import SpladePool
from fastqt.nn.static_embedding import StaticEmbedding
from fastqt.nn.transformer import Transformer

__all__ = [
    "GRU",
    "LSTM",
    "AnglELoss",
    "ArcFaceLoss",
    "BagOfWords",
    "BinaryWindowLoss",
    "CLIPLoss",
    "CURLBlockLoss",
    "CURLLoss",
    "CachedContrastive",
    "CoSENTLoss",
    "Combine",
    "CombinedQuickThoughts",
    "ContrastiveLoss",
    "CosFaceLoss",
    "DCLLoss",
    "DistillationLoss",
    "Encoder",
    "FlopsLoss",
    "GISTEmbedLoss",
    "GRUEncoder",
    "Gloss",
    "GlossBagOfWordsLoss",
    "GlossPositionalLoss",
    "HCLLoss",
    "Inference",
    "InfoNCELoss",
    "LSEPLoss",
    "LSTMEncoder",
    "MarginMSELoss",
    "MaskedWordHead",
    "MaxMarginLoss",
    "MaxSimLoss",
    "MixCSE",
    "MixCSELoss",
    "MultiChannel",
    "MultipleNegativesRankingLoss",
    "NTXentLoss",
    "NegativeSamplingLoss",
    "Queue",
    "QuickThoughts",
    "ScoreDistillationLoss",
    "SigLIPLoss",
    "SigmoidLoss",
    "SimCSE",
    "SimCSELoss",
    "SimilarityDistillationLoss",
    "SkipThoughts",
    "SpladePool",
    "SpreadOutLoss",
    "StaticEmbedding",
    "SupConLoss",
    "Transformer",
    "mask_words",
]


def __dir__() -> list[str]:
    """The public names, without the modules that hold them."""
    return __all__
