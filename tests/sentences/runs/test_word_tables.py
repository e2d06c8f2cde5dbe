"""Which word tables a model has, which are frozen, and how often each is counted."""

from dataclasses import replace

import pytest

from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import build_model, outline
from fastqt.sentences.runs.word_tables import tables_of_vectors, word_tables

V, W, H = 11, 4, 6
CONFIG = TrainConfig(("x",), encoder="gru", vectors="v.npz", word_dim=W, hidden_size=H, layers=1, heads=2)
GRU = 3 * H * (W + H + 1)  # weights of a uni-GRU
BIGRU = 3 * H * (W + H // 2 + 1)


@pytest.mark.parametrize("build", [build_model, outline])
@pytest.mark.parametrize(
    ("settings", "tables", "started", "frozen", "trained_weights"),
    [
        ({"encoder": "bow"}, 2, 2, 0, 2 * V * W),
        ({"encoder": "gru"}, 2, 2, 0, 2 * (V * W + GRU)),
        ({"encoder": "gru", "freeze_vectors": True}, 1, 1, 1, 2 * GRU),
        ({"encoder": "bigru", "model": "simcse", "freeze_vectors": True}, 1, 1, 1, BIGRU),
        ({"encoder": "mc-bow"}, 3, 1, 1, 2 * V * W),
        ({"encoder": "mc-gru"}, 3, 1, 1, 2 * (V * W + 2 * GRU)),
        ({"encoder": "mc-bigru"}, 3, 1, 1, 2 * (V * W + 2 * BIGRU)),
        ({"encoder": "mc-bigru", "model": "mixcse"}, 2, 1, 1, V * W + 2 * BIGRU),
        ({"encoder": "combine"}, 4, 4, 0, 4 * V * W + 2 * GRU + 2 * BIGRU),
        ({"encoder": "combine", "freeze_vectors": True}, 2, 2, 2, 2 * GRU + 2 * BIGRU),
    ],
    ids=range(10),
)
def test_each_table_is_counted_once(build, settings, tables, started, frozen, trained_weights):
    config = replace(CONFIG, **settings)
    model = build(config, V)
    assert len(word_tables(model)) == tables
    assert len(tables_of_vectors(model, config)) == started
    assert sum(not table.weight.requires_grad for table in word_tables(model)) == frozen
    assert sum(name.endswith("embedding.weight") for name in model.state_dict()) == tables
    weights = [weight for name, weight in model.named_parameters() if "bias_hh" not in name]
    assert sum(weight.numel() for weight in weights if weight.requires_grad) == trained_weights


def test_positions_are_no_words():
    model = build_model(replace(CONFIG, encoder="transformer", model="simcse", feedforward=5), V)
    (table,) = word_tables(model)
    assert table.weight.shape == (V, W)
