"""The replayed AdamW is dense AdamW over 500 steps on the words of novels."""

import itertools
import lzma
from collections import Counter
from pathlib import Path

import pytest
import torch

import fastqt
from fastqt.nn import StaticEmbedding
from tests.shared.tolerances import relative

NOVELS = Path(__file__).parents[3] / "shared" / "data" / "corpus" / "train.txt.xz"
V, D, STEPS, BATCH = 2000, 16, 500, 32


@pytest.fixture(scope="module")
def sentences():
    """The word ids of consecutive sentences; 0 for rare words."""
    if not NOVELS.exists():
        pytest.skip(f"no corpus of novels at {NOVELS}")
    with lzma.open(NOVELS, "rt", encoding="utf-8") as file:
        lines = [line.split() for line in itertools.islice(file, 6000)]
    counts = Counter(word for words in lines for word in words)
    ids = {word: number for number, (word, _) in enumerate(counts.most_common(V - 1), 1)}
    return [[ids.get(word, 0) for word in words] for words in lines if words]


def trained(sentences, *, sparse):
    """The table (V, D), and the losses of neighbours, with a schedule, weight decay and clipping."""
    torch.manual_seed(0)
    model = StaticEmbedding(V, D, sparse=sparse).double()
    settings = {"lr": 0.02, "weight_decay": 0.01}
    if sparse:
        optimizer = fastqt.optim.AdamW(model.parameters(), **settings, rows="replayed")
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    clip = fastqt.optim.clip_grad_norm_ if sparse else torch.nn.utils.clip_grad_norm_
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)

    losses = []
    for step in range(STEPS):
        texts = [sentences[(step * BATCH + row) % len(sentences)] for row in range(BATCH + 1)]
        lengths = torch.tensor([len(words) for words in texts])
        vectors = model(torch.tensor([*itertools.chain(*texts)]), lengths.cumsum(0) - lengths)
        loss = fastqt.info_nce_loss(vectors[:-1], vectors[1:])
        optimizer.zero_grad()
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    model.eval()  # brings all rows up to date
    return model.embedding.weight.detach(), torch.stack(losses)


def test_replayed_steps_are_those_of_dense_adam(sentences):
    (table, losses), (wanted, of_dense) = (trained(sentences, sparse=sparse) for sparse in (True, False))
    assert of_dense[-50:].mean() < 0.9 * of_dense[:50].mean()
    assert relative(losses, of_dense) < 1e-12
    assert relative(table, wanted) < 1e-11  # Adam magnifies the rounding errors of float64
