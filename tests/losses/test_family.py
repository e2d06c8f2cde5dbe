"""What holds for all losses of the family: memory, accuracy, and what they refuse."""

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared.loss_views import by_memory, cosines
from tests.shared.tolerances import EAGER_FACTOR, HALF_ULP

MEMORY_OF_LOSSES = """
import resource, torch, fastqt
def losses(N):
    z = [(torch.randn(N, 16) * 0.1).requires_grad_() for _ in range(3)]
    words = torch.arange(N)
    {losses}
for loss in losses({small}):
    loss.backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for loss in losses({N}):
    loss.backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
OF_ONE_BLOCK = """
    yield fastqt.simcse_loss(*z, hard_negative_weight=1.0, memory={memory!r})
    yield fastqt.mixcse_loss(*z[:2], memory={memory!r})
    yield fastqt.clip_loss(*z[:2], scale=10.0, memory={memory!r})
    yield fastqt.info_nce_loss(*z[:2], negatives=z[2], label_smoothing=0.1, memory={memory!r})
    yield fastqt.siglip_loss(*z[:2], scale=10.0, bias=-10.0, memory={memory!r})
    yield fastqt.curl_block_loss(*z[:2])
    yield fastqt.gloss_bow_loss(*z[:2], torch.zeros(N), words, words, memory={memory!r})
    yield fastqt.gloss_pos_loss(z[0], z[1][:1], z[2], torch.zeros(N), words[:, None], words * 0 + 1,
                                memory={memory!r})
"""
OF_RANKING = """
    options = dict(memory={memory!r}, hardness_strength=5.0)
    directions = "query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"
    hard = dict(directions=directions, hardness_mode="hard_negatives")
    yield fastqt.multiple_negatives_ranking_loss(z[0], z[1:], **options, **hard)
    yield fastqt.multiple_negatives_ranking_loss(z[0], z[1:], memory={memory!r}, directions=directions[:2])
    yield fastqt.multiple_negatives_ranking_loss(z[0], z[1:], **options, hardness_mode="in_batch_negatives")
"""
OF_WHOLE_BATCHES = """
    yield fastqt.cosent_loss(*z[:2], words)
    yield fastqt.angle_loss(*z[:2], words // 2)
    yield fastqt.spread_out_loss(z[0])
    yield fastqt.similarity_distillation_loss(z[0], z[1])
    yield fastqt.similarity_distillation_loss(*z[:2], candidates=z[2], teacher_candidates=z[1])
"""
OF_TWO_VIEWS = """
    yield fastqt.dcl_loss(*z[:2], sigma=0.5, memory={memory!r})
    yield fastqt.hcl_loss(*z[:2], memory={memory!r})
    yield fastqt.cosface_loss(z[0], z[1], words, memory={memory!r})
    yield fastqt.arcface_loss(z[0], z[1], words, memory={memory!r})
"""
OF_THREE_BLOCKS = """
    yield fastqt.mixcse_loss(*z[:2], form="released", memory={memory!r})
"""


def memory_growth(losses: str, memory: str, *, small: int, N: int) -> int:
    """MiB by which a process grows when it computes losses of N rows after losses of `small` rows."""
    script = MEMORY_OF_LOSSES.format(losses=losses.format(memory=memory).strip(), small=small, N=N)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.slow
@by_memory
def test_no_matrix_of_scores(memory):
    """At N = 8,192 a matrix of scores takes 256 MiB."""
    assert memory_growth(OF_ONE_BLOCK, memory, small=64, N=8192) < 128


@pytest.mark.slow
@by_memory
def test_no_matrix_of_scores_in_ranking(memory):
    """At N = 8,192 a matrix of scores takes 256 MiB."""
    assert memory_growth(OF_RANKING, memory, small=64, N=8192) < 128


@pytest.mark.slow
def test_no_matrix_in_losses_of_a_whole_batch():
    """At N = 16,384 a matrix of differences takes a GiB."""
    assert memory_growth(OF_WHOLE_BATCHES, "fast", small=64, N=16384) < 64


@pytest.mark.slow
@by_memory
def test_no_matrix_of_two_views_or_classes(memory):
    """At N = 8,192 a matrix of scores takes 256 MiB, and that of all 2 N views four times as much."""
    assert memory_growth(OF_TWO_VIEWS, memory, small=64, N=8192) < 160


@pytest.mark.slow
@by_memory
def test_no_matrix_of_scores_in_the_three_block_form(memory):
    """At N = 16,384 a matrix of scores takes a GiB."""
    assert memory_growth(OF_THREE_BLOCKS, memory, small=64, N=16384) < 256


def alike(seed: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of 64 sentences that differ by `noise`, relatively."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(64, 48, generator=generator)
    return z, z + noise * torch.randn(64, 48, generator=generator)


@pytest.mark.parametrize("noise", [0.03, 1.0])
@pytest.mark.parametrize("loss", ["simcse", "clip", "released"])
def test_error_is_at_most_eagers(loss, noise):
    """This holds also where the two views are nearly equal and the loss is close to 0."""

    def ours(z1, z2):
        if loss == "simcse":
            return fastqt.simcse_loss(z1, z2, z1.detach().flip(0), hard_negative_weight=1.0, scale=50.0)
        if loss == "clip":
            return fastqt.clip_loss(z1, z2, scale=50.0)
        return fastqt.mixcse_loss(z1, z2, form="released", scale=50.0, mix=0.6, masked_cell="exclude")

    def eager(z1, z2):
        eye, scores = torch.eye(len(z1), dtype=z1.dtype), 50 * cosines(z1, z2)
        own = torch.arange(len(z1))
        if loss == "clip":
            return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
        if loss == "simcse":
            columns = [scores, 50 * cosines(z1, z1.detach().flip(0)) + eye]
        else:
            after = eye.roll(1, 1).bool()
            a, m = (0.6 * z + 0.4 * z.roll(-1, 0) for z in (z1.detach(), z2.detach()))
            blocks = ((50 * cosines(z1, m), after.T), (50 * cosines(a, z2), after))
            columns = [scores, *(block.masked_fill(cells, -math.inf) for block, cells in blocks)]
        return F.cross_entropy(torch.cat(columns, 1), own)

    errors = {ours: [], eager: []}
    # The rounding error of a single number, the loss, is small or large by chance: its mean needs many draws.
    for seed in range(20):
        views = alike(seed, noise)
        exact_inputs = [z.double().requires_grad_() for z in views]
        exact = eager(*exact_inputs)
        wanted = [exact.detach(), *torch.autograd.grad(exact, exact_inputs)]
        for function, found in errors.items():
            inputs = [z.clone().requires_grad_() for z in views]
            value = function(*inputs)
            results = [value.detach(), *torch.autograd.grad(value, inputs)]
            found.append([float((a - b).norm() / b.norm()) for a, b in zip(results, wanted, strict=True)])
    a, b = (torch.tensor(x).mean(0) for x in errors.values())
    assert (a <= EAGER_FACTOR * b + HALF_ULP[torch.float32]).all(), (a, b)


Z = torch.randn(6, 4)
IDS, STARTS = torch.tensor([0, 1]), torch.zeros(6).long()


REFUSED = {
    "z3 of others": (fastqt.simcse_loss, (Z, Z, Z[:5]), {}, "z3: want a row for each of the 6 rows of z1"),
    "weight": (
        fastqt.simcse_loss,
        (Z, Z, Z),
        {"hard_negative_weight": math.inf},
        "hard_negative_weight: want",
    ),
    "one sentence": (fastqt.mixcse_loss, (Z[:1], Z[:1]), {}, "z2: want two views of at least 2 sentences"),
    "form": (fastqt.mixcse_loss, (Z, Z), {"form": "paper"}, "form: want one of 'slides', 'released'"),
    "mix": (fastqt.mixcse_loss, (Z, Z), {"form": "released", "mix": 1.5}, "mix: want a number in 0..1"),
    "smoothing": (
        fastqt.info_nce_loss,
        (Z, Z),
        {"label_smoothing": -0.1},
        "label_smoothing: want a number in 0..1",
    ),
    "clip smoothing": (
        fastqt.clip_loss,
        (Z, Z),
        {"scale": 1.0, "label_smoothing": 1.1},
        "label_smoothing: want a number in 0..1, got 1.1",
    ),
    "pairs": (fastqt.clip_loss, (Z, Z[:5]), {"scale": 1.0}, "b: want a row for each of the 6 rows"),
    "candidates": (
        fastqt.curl_block_loss,
        (Z, Z[:5]),
        {},
        "candidates: want a row for each of the 6 rows of queries",
    ),
    "shift": (fastqt.curl_block_loss, (Z, Z), {"context_size": 2}, "context_size: want 2 k"),
    "complement": (
        fastqt.curl_block_loss,
        (Z, Z),
        {"context_size": 5, "negatives": "complement"},
        "context_size: leaves no sentence",
    ),
    "curl": (
        fastqt.curl_loss,
        (Z, Z, Z[:5]),
        {},
        "negatives: want a row for each of the 6 rows of queries, got 5",
    ),
    "places": (fastqt.gloss_pos_loss, (Z, Z, Z, Z[:, 0], STARTS, STARTS), {}, "token_ids: want shape"),
    "lengths": (
        fastqt.gloss_pos_loss,
        (Z, Z, Z, Z[:, 0], STARTS.expand(6, 6), STARTS + 7),
        {},
        "lengths: want one in 0..6",
    ),
    "ids": (fastqt.gloss_bow_loss, (Z, Z, Z[:, 0], IDS + 5, STARTS), {}, "token_ids: want integers in 0..5"),
    "offsets": (fastqt.gloss_bow_loss, (Z, Z, Z[:, 0], IDS, STARTS[:5]), {}, "offsets: want one for each"),
    "falling": (fastqt.gloss_bow_loss, (Z, Z, Z[:, 0], IDS, 5 - torch.arange(6)), {}, "offsets: want rising"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    function, inputs, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        function(*inputs, **options)
