"""An untrained model."""

import pytest
import torch

from fastqt.runs.config import TrainConfig
from fastqt.runs.model import SentenceEncoder, build_model
from fastqt.text import Vocabulary


@pytest.fixture
def encoder_of_words(planted):
    config = TrainConfig((planted[0],), encoder="bow", word_dim=8)
    with open(planted[0]) as file:
        vocabulary = Vocabulary.build(file, 60)
    torch.manual_seed(0)
    return SentenceEncoder(build_model(config, len(vocabulary)).eval(), vocabulary, torch.device("cpu"))
