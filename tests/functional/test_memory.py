"""Losses allocate little beside their inputs and gradients, and never a matrix of N x N scores.

Each process measures itself, as no other test has left free memory in it.
"""

import subprocess
import sys

import pytest

MEASURE = """
import resource, sys, torch, fastqt
def peak():  # MiB; Linux counts KiB, macOS bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (20 if sys.platform == "darwin" else 10)
def losses(N, {how}):
    def rows(*shape):
        return torch.randn(shape or (N, 16)).mul_(0.1).requires_grad_()
    a, b, c = rows(), rows(), rows()
    words = torch.arange(N)
    {losses}
for N in (64, {N}):  # what is loaded once is loaded by a small loss
    before = peak()
    for loss in losses(N):
        loss.sum().backward()
print(peak() - before)
"""
# Of each group: N, how many MiB the process may grow by, and a generator of losses.
LOSSES = {
    # Scores would take 256 MiB, and 64 as a mask.
    "contrastive": (8192, 64, "yield fastqt.contrastive_loss(rows(N, 32), rows(N, 32), memory=memory)"),
    "torch": (8192, 64, "yield fastqt.contrastive_loss(a, b, memory=memory, backend='torch')"),
    "guide": (
        *(8192, 128),
        """guide = fastqt.Guide(b.detach(), c.detach())
    yield fastqt.info_nce_loss(a, b, exclude=guide)
    yield fastqt.log_sum_exp(a, b, exclude=guide)
    guides = dict(guide_anchors=b.detach(), guide_positives=c.detach(), guide_negatives=b.detach())
    yield fastqt.gist_embed_loss(a, b, c, **guides)""",
    ),
    "pairs and words": (
        *(8192, 128),
        """yield fastqt.simcse_loss(a, b, c, hard_negative_weight=1.0, memory=memory)
    yield fastqt.mixcse_loss(a, b, memory=memory)
    yield fastqt.clip_loss(a, b, scale=10.0, memory=memory)
    yield fastqt.info_nce_loss(a, b, negatives=c, label_smoothing=0.1, memory=memory)
    yield fastqt.siglip_loss(a, b, scale=10.0, bias=-10.0, memory=memory)
    yield fastqt.curl_block_loss(a, b)
    yield fastqt.max_margin_loss(a, b)
    yield fastqt.gloss_bow_loss(a, b, torch.zeros(N), words, words, memory=memory)
    positions, lengths = b[:1], words * 0 + 1
    yield fastqt.gloss_pos_loss(a, positions, c, torch.zeros(N), words[:, None], lengths, memory=memory)""",
    ),
    "ranking": (
        *(8192, 128),
        """options = dict(memory=memory, hardness_strength=5.0)
    directions = "query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"
    hard = dict(directions=directions, hardness_mode="hard_negatives")
    yield fastqt.multiple_negatives_ranking_loss(a, [b, c], **options, **hard)
    yield fastqt.multiple_negatives_ranking_loss(a, [b, c], memory=memory, directions=directions[:2])
    yield fastqt.multiple_negatives_ranking_loss(a, [b, c], **options, hardness_mode="in_batch_negatives")""",
    ),
    # Scores of all 2 N views would take a GiB.
    "two views and classes": (
        *(8192, 160),
        """yield fastqt.dcl_loss(a, b, sigma=0.5, memory=memory)
    yield fastqt.hcl_loss(a, b, memory=memory)
    yield fastqt.cosface_loss(a, b, words, memory=memory)
    yield fastqt.arcface_loss(a, b, words, memory=memory)""",
    ),
    # Scores would take 144 MiB, and indices of the 19 million pairs of two classes 288.
    "labels": (
        *(6144, 96),
        """for classes in (2, 4096):
        yield fastqt.supcon_loss(a, words % classes, memory=memory)
        yield fastqt.ntxent_loss(a, words % classes, memory=memory)""",
    ),
    # Differences of pairs would take a GiB.
    "whole batches": (
        *(16384, 64),
        """yield fastqt.cosent_loss(a, b, words)
    yield fastqt.angle_loss(a, b, words // 2)
    yield fastqt.spread_out_loss(a)
    yield fastqt.similarity_distillation_loss(a, b)
    yield fastqt.similarity_distillation_loss(a, b, candidates=c, teacher_candidates=b)""",
    ),
    # Scores would take a GiB.
    "three blocks": (16384, 256, "yield fastqt.mixcse_loss(a, b, form='released', memory=memory)"),
    # An input and its gradient of 64 MiB each, as which a normalised copy and its gradient would be as large.
    "cosines": (
        *(16384, 160),
        """candidates = rows(N, 1024)
    yield fastqt.contrastive_loss(rows(256, 1024), candidates, normalize=True, memory=memory)
    candidates.grad = None
    yield fastqt.sigmoid_loss(rows(256, 1024), candidates, normalize=True, memory=memory)""",
    ),
    "cosines of CLIP": (
        4096,
        104,
        "yield fastqt.clip_loss(rows(N, 1024), rows(N, 1024), scale=1.0, memory=memory)",
    ),
    # The tokens' scores would take 256 MiB.
    "tokens": (256, 48, "yield fastqt.maxsim_loss(rows(N, 32, 16), rows(N, 32, 16))"),
    # The tokens' logits would take 256 MiB, and so would each of the arrays that follow them.
    "vocabulary": (
        *(16384, 64),
        """pooled = fastqt.splade_pool(rows(32, 128, 16), rows(N, 16))
    yield fastqt.info_nce_loss(pooled, pooled) + fastqt.flops_loss(pooled)""",
    ),
    # Logits and their gradient would take 488 MiB each.
    "skip-thoughts": (
        *(16000, 128),
        """model = fastqt.nn.SkipThoughts(N, 4, 8)
    yield model.loss(torch.randint(N, (N // 32, 16)), torch.full((N // 32,), 16))""",
    ),
}
FIXED = ("guide", "whole batches", "tokens", "vocabulary", "skip-thoughts")  # in which no memory is given
OFTEN = [("contrastive", "low")]
MEASURED = [
    *((name, "low") for name in LOSSES if name not in FIXED),
    *((name, "fast") for name in (*FIXED, "contrastive", "torch", "cosines of CLIP")),
    *(("contrastive", room) for room in (2**24, 2**30)),
]


@pytest.mark.parametrize(
    ("name", "memory"),
    [pytest.param(*case, marks=() if case in OFTEN else pytest.mark.slow) for case in MEASURED],
)
def test_peak_memory_of_a_process(name, memory):
    N, most, losses = LOSSES[name]
    script = MEASURE.format(how=f"memory={memory!r}", losses=losses, N=N)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    most += 24 if (name, memory) == ("cosines of CLIP", "fast") else 0  # of scores
    assert float(run.stdout) <= most
