"""Typical mistakes of users: each message names the argument, what is wanted, what came, and what to do."""

import inspect
import re

import pytest
import torch

import fastqt
from fastqt import nn

F, G = torch.randn(2, 8, 16)
OWN = torch.arange(8)

# A call, what it names, what it wants, what it got, and what to do; all but the first as the message says it.
MISTAKES = {
    "a temperature in a call": (
        lambda: fastqt.info_nce_loss(F, G, temperature=0.05),
        ("temperature", "no option", "info_nce_loss", "want scale, which is 1 / temperature"),
    ),
    "a temperature": (
        lambda: nn.InfoNCELoss(temperature=0.05),
        ("temperature", "no option", "InfoNCELoss", "want scale, which is 1 / temperature"),
    ),
    "another width": (
        lambda: fastqt.info_nce_loss(F, G[:, :12]),
        ("candidates", "want D=16 columns", "got 12", "as queries has"),
    ),
    "fewer candidates": (
        lambda: fastqt.info_nce_loss(F, G[:5]),
        ("candidates", "want at least N=8 rows", "got 5", "one for each row of queries"),
    ),
    "one embedding": (
        lambda: fastqt.contrastive_loss(F[0], G[0]),
        ("queries", r"want shape \(rows, D\)", r"got \(16,\)", r"make a row of it by unsqueeze\(0\)"),
    ),
    "scores and labels": (
        lambda: fastqt.contrastive_loss(F @ G.T, torch.arange(8)),
        ("candidates", r"want shape \(rows, D\)", r"got \(8,\)", "give embeddings, not scores and labels"),
    ),
    "embeddings of tokens": (
        lambda: fastqt.simcse_loss(F[None], G[None]),
        ("z1", r"want shape \(rows, D\)", r"got \(1, 8, 16\)", "flatten .* or pool over them"),
    ),
    "no rows": (
        lambda: fastqt.contrastive_loss(F[:0], G[:0]),
        ("queries", "want at least one row", r"got shape \(0, 16\)", "skip such a batch"),
    ),
    "integer embeddings": (
        lambda: fastqt.contrastive_loss(F.long(), G.long()),
        ("queries", "want a floating-point dtype", r"got torch\.int64", r"convert it by float\(\)"),
    ),
    "an array": (
        lambda: fastqt.contrastive_loss(F.numpy(), G.numpy()),
        ("queries", "want a tensor", "got ndarray", "convert it by torch.as_tensor"),
    ),
    "two dtypes": (
        lambda: fastqt.clip_loss(F, G.half(), scale=20.0),
        ("b", "want dtype torch.float32 as a", r"got torch\.float16", r"convert it by to\(\)"),
    ),
    "another device": (
        lambda: fastqt.contrastive_loss(F, G.to("meta")),
        (
            "candidates",
            "want a tensor with values",
            "got one on the device meta",
            "load the model's weights first",
        ),
    ),
    "labels of a float": (
        lambda: fastqt.supcon_loss(F, OWN.float()),
        ("labels", "want an integer dtype", r"got torch\.float32", r"convert it by long\(\)"),
    ),
    "labels in a column": (
        lambda: fastqt.ntxent_loss(F, OWN[:, None]),
        ("labels", "want a 1-D tensor of integers", r"got shape \(8, 1\)", r"make it 1-D by flatten\(\)"),
    ),
    "two views": (
        lambda: fastqt.ntxent_loss(F, G),
        ("labels", "want a 1-D tensor", r"got shape \(8, 16\)", r"torch\.cat\(.*torch\.arange.*repeat\(2\)"),
    ),
    "a label for each of other rows": (
        lambda: fastqt.supcon_loss(F, OWN[:5]),
        ("labels", "want one", "got 5", "for each of the 8 embeddings"),
    ),
    "a label out of range": (
        lambda: fastqt.contrastive_loss(F, G, OWN + 1, diagonal="keep"),
        ("targets", r"want 0\.\.7", "row 7's target column 8 is outside", "-100 for no target"),
    ),
    "targets on the diagonal": (
        lambda: fastqt.contrastive_loss(F, G, fastqt.Diagonal()),
        ("targets", "has its targets on the diagonal", "diagonal='zero'", "use diagonal='keep'"),
    ),
    "targets of other sizes": (
        lambda: fastqt.contrastive_loss(F, G, torch.eye(5), diagonal="keep"),
        ("targets", "want shape", r"got \(5, 5\)", r"\(N, M\) = \(8, 8\)"),
    ),
    "sparse targets of another layout": (
        lambda: fastqt.Sparse(torch.eye(8).to_sparse()),
        ("csr_tensor", r"want .* torch\.sparse_csr", r"got .* torch\.sparse_coo", r"to_sparse_csr\(\)"),
    ),
    "no number as scale": (
        lambda: fastqt.info_nce_loss(F, G, scale=float("nan")),
        ("scale", "want a finite number", "got nan", "which is 1 / temperature"),
    ),
    "a negative scale": (
        lambda: fastqt.info_nce_loss(F, G, scale=-20.0),
        ("scale", "want a positive number", r"got -20\.0", "which is 1 / temperature"),
    ),
    "a scale of one dimension": (
        lambda: fastqt.clip_loss(F, G, scale=torch.ones(1)),
        ("scale", "want a number or a 0-d tensor", r"got shape \(1,\)", r"make it 0-d by squeeze\(\)"),
    ),
    "a reduction that is none": (
        lambda: fastqt.contrastive_loss(F, G, reduction="avg"),
        ("reduction", "want one of", "got 'avg'", "'mean', 'sum', 'none', 'mean_of_targets'"),
    ),
    "a backend that is none": (
        lambda: fastqt.contrastive_loss(F, G, backend="cudnn"),
        ("backend", "want one of cpu, cuda", "got 'cudnn'", r"show_config\(\) says which work here"),
    ),
    "a backend that does not work here": (
        lambda: fastqt.contrastive_loss(F, G, backend="cuda"),
        ("backend", "'cuda'", "is not available: .", "without one the best that works is taken"),
    ),
    "document_ids of another length": (
        lambda: fastqt.contrastive_loss(F, G, document_ids=OWN[:5]),
        ("document_ids", "want one id", "got 5 ids", "for each of N=8 queries"),
    ),
    "no context": (
        lambda: fastqt.contrastive_loss(F, G, context_size=0),
        ("context_size", "want an integer", "got 0", ">= 1"),
    ),
    "a context beyond the batch": (
        lambda: fastqt.contrastive_loss(F, G, context_size=8),
        ("context_size", "want a reach of fewer rows", "got 8", "take a smaller one, or a larger batch"),
    ),
    "negatives of another width": (
        lambda: fastqt.info_nce_loss(F, G, negatives=G[:, :12]),
        ("negatives", "want D=16 columns", "got 12", "as queries has"),
    ),
    "a mask of numbers": (
        lambda: fastqt.contrastive_loss(F, G, mask=torch.zeros(8, 8)),
        ("mask", r"want dtype torch\.bool", r"got torch\.float32", r"convert it by bool\(\)"),
    ),
    "the name of a group": (
        lambda: fastqt.info_nce_loss(F, G, group="world"),
        ("group", "want a Group, a ProcessGroup", "got str", r"are torch\.distributed\.group\.WORLD"),
    ),
    "too little memory": (
        lambda: fastqt.contrastive_loss(F, G, memory=1024),
        ("memory", "want at least", "got 1024", "16777216 bytes"),
    ),
    "one direction as a text": (
        lambda: fastqt.multiple_negatives_ranking_loss(F, G, directions="query_to_doc"),
        ("directions", "want a sequence of names", "got 'query_to_doc'", "put the name into a list"),
    ),
    "an option in a call": (
        lambda: nn.InfoNCELoss()(F, G, reduction="sum"),
        ("reduction", "want it", "not in a call", "when InfoNCELoss is made"),
    ),
    "labels where a module is made": (
        lambda: nn.ContrastiveLoss(document_ids=OWN),
        ("document_ids", "no option", "ContrastiveLoss", "want it in each call"),
    ),
    "a misspelt option in a call": (
        lambda: fastqt.clip_loss(F, G, scale=1.0, reducton="sum"),
        ("reducton", "no option", "clip_loss", "the nearest is reduction"),
    ),
    "a misspelt option": (
        lambda: nn.SimCSELoss(reducton="sum"),
        ("reducton", "no option", "SimCSELoss", "the nearest is reduction"),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_message_says_what_to_do(mistake):
    make, parts = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError)) as raised:
        make()
    message = str(raised.value)
    assert not [part for part in parts if not re.search(part, message)], message
    assert re.match(rf"[\w() ]*\b{parts[0]}\b", message), "the message begins with the argument's name"
    assert message.isprintable()
    assert len(message) < 200


LOSSES = [name for name in fastqt.__all__ if name.endswith("_loss") or name == "log_sum_exp"]


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_says_what_stands_for_a_temperature(name):
    loss = getattr(fastqt, name)
    advice = "; want scale, which is 1 / temperature" if "scale" in inspect.signature(loss).parameters else ""
    with pytest.raises(TypeError, match=f"^temperature: no option of {name}{advice}"):
        loss(temperature=0.05)
