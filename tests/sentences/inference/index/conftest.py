"""An untrained model, and one thread for faiss."""

import pytest
import torch

from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import build_model
from fastqt.sentences.text import Vocabulary


@pytest.fixture(scope="module", autouse=True)
def one_thread_of_faiss():
    """Its threads wait actively, as those of torch do: on a busy machine small searches would be slow."""
    faiss = pytest.importorskip("faiss", reason="the extra faiss is not installed")
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


@pytest.fixture
def encoder_of_words(planted):
    config = TrainConfig((planted[0],), encoder="bow", word_dim=8)
    with open(planted[0]) as file:
        vocabulary = Vocabulary.build(file, 60)
    torch.manual_seed(0)
    return SentenceEncoder(build_model(config, len(vocabulary)).eval(), vocabulary, torch.device("cpu"))
