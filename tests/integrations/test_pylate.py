"""PyLate's contrastive loss, from its formula, and from PyLate itself where that is installed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastqt
from fastqt.integrations.pylate import CachedContrastive, Contrastive
from tests.shared.tolerances import FLOAT64, relative

SKIPLIST = [2, 5]


class Tokens(nn.Embedding):
    """A model of tokens without context."""

    skiplist = SKIPLIST

    def __init__(self, do_query_expansion=True):
        super().__init__(12, 6, dtype=torch.float64)
        self.do_query_expansion = do_query_expansion

    def forward(self, features):
        return {"token_embeddings": super().forward(features["input_ids"])}


def columns(count, tokens=(4, 7, 7, 7)):
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(12, (5, length), generator=generator),
            "attention_mask": (
                torch.arange(length) <= torch.randint(length, (5, 1), generator=generator)
            ).long(),
        }
        for length in tokens[:count]
    ]


def formula(model, columns, temperature, size_average):
    """All similarities, with 0 for tokens that are not scored, of each column of documents."""
    queries, *documents = (F.normalize(model(x)["token_embeddings"], dim=2) for x in columns)
    blocks = []
    for vectors, features in zip(documents, columns[1:], strict=True):
        ids = features["input_ids"]
        scored = features["attention_mask"].bool() & (ids != SKIPLIST[0]) & (ids != SKIPLIST[1])
        products = torch.einsum("ash,bth->abst", queries, vectors) * scored[:, None]
        if not model.do_query_expansion:
            products = products * columns[0]["attention_mask"][:, None, :, None]
        blocks.append(products.amax(3).sum(2))
    scores = torch.cat(blocks, 1) / temperature
    return F.cross_entropy(scores, torch.arange(5), reduction="mean" if size_average else "sum")


def compare(ours, theirs, model):
    """Value and gradient; both may be of the same scores."""
    of_weights = [torch.autograd.grad(x, model.weight, retain_graph=True)[0] for x in (ours, theirs)]
    found, wanted = (
        torch.cat([x.detach().reshape(1), gradient.flatten()])
        for x, gradient in zip((ours, theirs), of_weights, strict=True)
    )
    assert relative(found, wanted) < FLOAT64


@pytest.mark.parametrize("expands", [True, False])
@pytest.mark.parametrize("size_average", [True, False])
@pytest.mark.parametrize("count", [2, 4])
def test_is_the_formula(count, size_average, expands):
    model, features = Tokens(expands), columns(count)
    loss = Contrastive(model, size_average=size_average, temperature=0.3)
    compare(loss(features), formula(model, features, 0.3, size_average), model)


@pytest.mark.parametrize("expands", [True, False])
@pytest.mark.parametrize("count", [2, 4])
def test_is_pylates(count, expands):
    losses = pytest.importorskip("pylate.losses", reason="PyLate is not installed")
    model, features = Tokens(expands), columns(count)
    options = {"size_average": False, "temperature": 0.3}
    compare(Contrastive(model, **options)(features), losses.Contrastive(model, **options)(features), model)


@pytest.mark.parametrize("mini_batch_size", [1, 2, 32])
@pytest.mark.parametrize("size_average", [True, False])
def test_mini_batches_change_neither_value_nor_gradients(size_average, mini_batch_size):
    model, features = Tokens(), columns(3)
    loss = CachedContrastive(model, None, mini_batch_size, size_average=size_average, temperature=0.3)
    value = loss(features)
    (3 * value).backward()
    theirs = formula(model, features, 0.3, size_average)
    (wanted,) = torch.autograd.grad(3 * theirs, model.weight)
    assert relative(value, theirs) < FLOAT64
    assert relative(model.weight.grad, wanted) < FLOAT64
    with torch.no_grad():
        assert relative(loss(features), value) < FLOAT64


def test_cached_values_are_pylates():
    """Of its gradients those of the mean are larger by the number of queries."""
    losses = pytest.importorskip("pylate.losses", reason="PyLate is not installed")
    model, features = Tokens(), columns(3)
    for size_average in (True, False):
        options = {"mini_batch_size": 2, "size_average": size_average, "temperature": 0.3}
        values, gradients = [], []
        for kind in (CachedContrastive, losses.CachedContrastive):
            model.zero_grad()
            value = kind(model, **options)(features)
            value.backward()
            values.append(value.detach())
            gradients.append(model.weight.grad.clone())
        assert relative(*values) < FLOAT64
        assert (
            relative(gradients[0] * (len(features[0]["input_ids"]) if size_average else 1), gradients[1])
            < 1e-6
        )


@pytest.mark.parametrize("options", [{}, {"normalize_scores": False, "size_average": False}])
def test_scores_of_a_teacher_are_pylates(options):
    """What docs/migrating.md has in place of PyLate's `Distillation`, of the scores that PyLate computes."""
    losses = pytest.importorskip("pylate.losses", reason="PyLate is not installed")
    model, (queries, _, documents, _) = Tokens(), columns(4)
    documents = {key: x.repeat(3, 1) for key, x in documents.items()}
    documents["input_ids"] = (documents["input_ids"] + torch.arange(15)[:, None]) % 12
    labels = torch.randn(5, 3, dtype=torch.float64)
    computed = []

    def score(*embeddings, **masks):
        computed.append(losses.distillation.colbert_kd_scores(*embeddings, **masks))
        return computed[0]

    theirs = losses.Distillation(model, score, **options)([queries, documents], labels)
    (scores,) = computed
    if options.get("normalize_scores", True):
        low, high = scores.amin(1, keepdim=True), scores.amax(1, keepdim=True)
        scores = (scores - low) / (high - low + 1e-8)
    reduction = "mean" if options.get("size_average", True) else "sum"
    ours = fastqt.score_distillation_loss(scores, labels, reduction=reduction)
    compare(ours, theirs, model)


def test_a_model_within_ddp_and_columns_of_other_lengths():
    """PyLate stacks columns of one length; shorter ones are as if padded."""
    model = Tokens()
    wrapped = nn.DataParallel(model)
    wrapped.forward = model.forward
    features = columns(3, (4, 7, 5))
    compare(Contrastive(wrapped)(features), formula(model, features, 1.0, True), model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "bert"}, TypeError, "model: want a ColBERT model"),
        ({"score_metric": torch.matmul}, ValueError, "score_metric: want None or PyLate's ColBERTScores"),
        ({"temperature": 0.0}, ValueError, "temperature: want a positive number"),
        ({"temperature": "low"}, TypeError, "temperature: want a number"),
        ({"size_average": 1}, TypeError, "size_average: want True or False"),
        ({"gather_across_devices": None}, TypeError, "gather_across_devices: want True or False"),
        ({"score_mini_batch_size": 0}, ValueError, "score_mini_batch_size: want at least 1"),
    ],
)
def test_refuses_nonsense(options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        Contrastive(**{"model": Tokens(), **options})
    with pytest.raises(error, match=f"^{message}"):
        CachedContrastive(**{"model": Tokens(), **options})


def test_refuses_mini_batches_of_no_texts():
    with pytest.raises(ValueError, match=r"^mini_batch_size: want at least 1"):
        CachedContrastive(Tokens(), mini_batch_size=0)
