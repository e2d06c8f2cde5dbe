"""The binary loss of windows equals its definition, with all contexts and with sampled ones."""

import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared.loss_views import check, views

N = 9
DOCUMENTS = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3])  # sentences 3 and 8 have no neighbour


def contexts(g, k, documents):
    """The sum of each sentence's neighbours, and the sentences that have one."""
    found, known = [], []
    for i in range(N):
        near = [j for j in range(N) if j != i and abs(i - j) <= k and documents[j] == documents[i]]
        found.append(sum((g[j] for j in near), torch.zeros_like(g[0])))
        if near:
            known.append(i)
    return found, known


@pytest.mark.parametrize("documents", [torch.zeros(N, dtype=torch.long), DOCUMENTS])
def test_sampled_contexts(documents, monkeypatch):
    f, g = inputs = views(N, N)
    c, known = contexts(g, 1, documents)
    drawn = []
    randint = torch.randint
    monkeypatch.setattr(
        torch, "randint", lambda *given, **named: drawn.append(randint(*given, **named)) or drawn[0]
    )
    loss = fastqt.binary_window_loss(f, g, document_ids=documents, samples=3, reduction="none")
    rows = [f.new_zeros(())] * N
    for place, i in enumerate(known):
        # Numbers from the own one on stand for the next: a sentence's own context is never drawn.
        others = [known[n + (n >= place)] for n in drawn[0][place].tolist()]
        assert i not in others
        rows[i] = F.softplus(-(f[i] @ c[i])) + sum(F.softplus(f[i] @ c[j]) for j in others)
    check(loss, torch.stack(rows), inputs)


def test_many_samples_are_the_mean_of_all_other_contexts():
    f, g = (x.detach() for x in views(N, N))
    c, known = contexts(g, 2, DOCUMENTS)
    generator, K = torch.Generator().manual_seed(0), 20_000
    found = fastqt.binary_window_loss(
        f, g, context_size=2, document_ids=DOCUMENTS, samples=K, generator=generator, reduction="none"
    )
    for i in known:
        scores = torch.stack([f[i] @ c[j] for j in known if j != i])
        negatives = (found[i] - F.softplus(-(f[i] @ c[i]))) / K
        spread = F.softplus(scores).std(correction=0) / K**0.5
        assert abs(negatives - F.softplus(scores).mean()) < 5 * spread


def test_sentences_without_neighbours_cost_nothing():
    f, g = views(N, N)
    loss = fastqt.binary_window_loss(f, g, document_ids=torch.arange(N))
    assert loss == 0
    assert not any(x.any() for x in torch.autograd.grad(loss, (f, g)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"samples": 2.0}, "samples: want an integer"),
        ({"context_size": N}, "want a reach of fewer rows"),
    ],
)
def test_what_cannot_be_taken_is_refused_in_words(options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        fastqt.binary_window_loss(*views(N, N), **options)


def test_one_window_alone_leaves_nothing_to_draw():
    f, g = views(2, 2)
    window = {"document_ids": torch.tensor([0, 1])}
    assert fastqt.binary_window_loss(f, g, samples=2, **window) == 0
    with pytest.raises(ValueError, match="candidates: want a row for each of the 2 rows of queries"):
        fastqt.binary_window_loss(f, g[:1])


@pytest.mark.slow
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_compiled_draws_are_of_all_other_contexts(documents):
    """Each of a sentence's samples is another's context, and none is left out of many."""
    f, g = views(N, N)
    c, known = contexts(g, 1, torch.zeros(N) if documents is None else documents)

    def loss(f, g):
        return fastqt.binary_window_loss(f, g, document_ids=documents, samples=1, reduction="none")

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    seen = {i: set() for i in known}
    for _ in range(100):
        rows = compiled(f.detach(), g.detach())
        for i in range(N):
            if i not in known:
                assert rows[i] == 0
                continue
            others = {j: F.softplus(-(f[i] @ c[i])) + F.softplus(f[i] @ c[j]) for j in known if j != i}
            found = [j for j, value in others.items() if abs(value - rows[i]) < 1e-10]
            assert found  # Two sentences of a document may have equal contexts.
            seen[i].update(found)
    assert all(drawn == {j for j in known if j != i} for i, drawn in seen.items())
