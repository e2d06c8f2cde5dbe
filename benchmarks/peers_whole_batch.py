"""Losses of a whole batch, and of recipes: ours, the formula with a matrix, and those of other libraries.

python -m benchmarks.peers_whole_batch              # measures and prints the tables; some minutes
python -m benchmarks.peers_whole_batch --write      # and stores the run, which the page renders
python -m benchmarks.peers_whole_batch --rows 512   # one size alone
python -m benchmarks.peers_whole_batch --write --only Triplet   # some losses anew, of a run of this machine

A step is the loss and its gradients. "matrix" is the formula of the paper in eager PyTorch, which makes all
N x N cells; "theirs" is the library's class of the installed version, and no class where it has none: that of
sentence-transformers, torch's F.linear_cross_entropy in chunks, and the SigLipLoss in chunks of open_clip,
which versions after 3.3.0 have. Errors are those of loss and gradients in float32, to the formula in float64,
for batches that a model has learnt.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import json
import math
import resource
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import fastqt
from benchmarks.measure.machine import processor_and_versions
from benchmarks.measure.tables import table
from benchmarks.measure.timing import Clock, Effort, Step, in_turns
from benchmarks.paths import RESULTS
from benchmarks.peers import MOST_MEMORY, OPEN_CLIP, Given, module_of, siglip, step_of
from benchmarks.peers import versions as installed

STORED = RESULTS / "peers-whole-batch.json"
ROWS, D = (512, 4096, 8192), 768
ERROR_ROWS = 2048  # more than two for each column
MOST_CELLS = 2**26  # of a matrix in eager PyTorch, whose step keeps several of them
EFFORT = Effort(warm_ups=1, least_rounds=3, seconds=2.0)
SIDES = ("matrix", "theirs", "ours")

Loss = Callable[..., Tensor]  # of the embeddings, (N, D) each


class Case(NamedTuple):
    """A loss in up to three implementations.

    Attributes:
        label: what the tables call it.
        inputs: the embeddings for a number of rows, random or, with True, as at the end of a training.
        matrix: the formula with a matrix, from the rows' embeddings.
        theirs: makes the library's loss; None where it has none.
        ours: fastqt's.
        most_rows: that it is measured with; each row of some losses has a product with all others.
    """

    label: str
    inputs: Callable[[int, bool], list[Tensor]]
    matrix: Loss
    theirs: Callable[[], Loss] | None
    ours: Loss
    most_rows: int = ROWS[-1]


def labels_of(rows: Tensor) -> Tensor:
    """Similarities of pairs in 0..1, of which many are equal."""
    return torch.arange(len(rows)) * 7 % 21 / 20


def labelled_pairs(N: int, learnt: bool) -> list[Tensor]:
    """Pairs, and once learnt with cosines of the order of their labels."""
    a, b = torch.randn(2, N, D, generator=torch.Generator().manual_seed(0))
    if learnt:
        steps = 4 * labels_of(a)[:, None].round(decimals=1) - 2
        b = steps * a + 0.1 * b
    return [a, b]


def ranking(scores: Tensor, labels: Tensor) -> Tensor:
    differences = scores[None] - scores[:, None]
    lower = differences.masked_fill(labels[:, None] <= labels, -torch.inf)
    return torch.cat([lower.flatten(), lower.new_zeros(1)]).logsumexp(0)


def cosent_of_matrix(a: Tensor, b: Tensor) -> Tensor:
    return ranking(20 * F.cosine_similarity(a, b), labels_of(a))


def angle_of_matrix(a: Tensor, b: Tensor) -> Tensor:
    (p, q), (r, t) = (F.normalize(x, dim=1).chunk(2, 1) for x in (a, b))
    return ranking(20 * (p * r + q * t + q * r - p * t).sum(1).abs(), labels_of(a))


def ranked_by(name: str) -> Loss:
    from sentence_transformers.sentence_transformer import losses

    loss = getattr(losses, name)(Given())
    return lambda a, b: loss.compute_loss_from_embeddings([a, b], labels_of(a))


def spread_rows(N: int, learnt: bool) -> list[Tensor]:
    """Random rows, which are a little more alike than random directions; learnt, nearly a basis."""
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
    return [torch.eye(D).repeat(N // D + 1, 1)[:N] + 1e-3 * x if learnt else x + 0.2]


def moments_of_matrix(x: Tensor) -> Tensor:
    unit = F.normalize(x, dim=1)
    scores = (unit @ unit.T).masked_fill(torch.eye(len(x), dtype=torch.bool), 0)
    pairs = len(x) * (len(x) - 1)
    return (scores.sum() / pairs).square() + (scores.square().sum() / pairs - 1 / x.shape[1]).relu()


def taught_rows(N: int, learnt: bool) -> list[Tensor]:
    """A student's rows, and once learnt nearly those of its teacher, turned."""
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
    if not learnt:
        return [x]
    rotation = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(2)))[0]
    return [teacher_of(x) @ rotation + 1e-3 * x]


def teacher_of(rows: Tensor) -> Tensor:
    return _teacher(len(rows), rows.dtype)


@functools.cache
def _teacher(N: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def distilled_by_matrices(x: Tensor) -> Tensor:
    student, teacher = (F.normalize(y, dim=1) for y in (x, teacher_of(x)))
    return (student @ student.T - teacher @ teacher.T).square().mean()


def regularised() -> Loss:
    from sentence_transformers.sentence_transformer import losses

    loss = losses.GlobalOrthogonalRegularizationLoss(Given())
    return lambda x: sum(loss.compute_loss_from_embeddings([x]).values())


def labelled_rows(N: int, learnt: bool) -> list[Tensor]:
    """Rows of eight a label, which are near each other, and once learnt nearly equal."""
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
    centres = torch.randn(N // 8 + 1, D, generator=torch.Generator().manual_seed(1))
    return [0.05 * (centres[labels_of_rows(x)] + (0.01 if learnt else 3.0) * x)]


def labels_of_rows(rows: Tensor) -> Tensor:
    return torch.arange(len(rows)) // 8


def triplets_of_matrix(x: Tensor, form: str) -> Tensor:
    distances, labels = torch.cdist(x, x), labels_of_rows(x)
    same = labels == labels[:, None]
    positive = same & ~torch.eye(len(x), dtype=torch.bool)
    negatives = distances.masked_fill(same, torch.inf)
    if form == "BatchAllTripletLoss":
        triplets = (distances[positive][:, None] - negatives[positive.nonzero()[:, 0]] + 5).relu()
        return triplets.sum() / (triplets > 0).sum().clamp(min=1)
    if form == "BatchSemiHardTripletLoss":
        in_order = negatives.sort(1).values
        place = torch.searchsorted(in_order.detach(), distances.detach(), right=True)
        last = (~same).sum(1, keepdim=True) - 1
        return (distances - in_order.gather(1, place.minimum(last)) + 5)[positive].relu().mean()
    lead = (distances * positive).amax(1) - negatives.amin(1)
    return (F.softplus(lead) if form == "BatchHardSoftMarginTripletLoss" else (lead + 5).relu()).mean()


def triplets_by(library: str, form: str) -> Loss:
    loss = getattr(importlib.import_module(library), form)(Given())
    return lambda x: loss.compute_loss_from_embeddings([x], labels_of_rows(x))


def two_views(N: int, learnt: bool) -> list[Tensor]:
    """Two views of each row, and once learnt nearly the same."""
    x, y = torch.randn(2, N, D, generator=torch.Generator().manual_seed(0))
    return [x, x + 0.05 * y if learnt else y]


def pairs_and_negatives(a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Of both views of N rows, the scores with the other view, (2 N,), and with other rows, (2 N, 2 N)."""
    both = F.normalize(torch.cat([a, b]), dim=1)
    scores = scale * both @ both.T
    rows = torch.arange(2 * len(a)) % len(a)
    negatives = scores.masked_fill(rows[:, None] == rows, -torch.inf)
    return scores.diagonal(len(a)).repeat(2), negatives


def with_own_rows(N: int, learnt: bool) -> list[Tensor]:
    """Pairs, and four hard negatives of each query alone."""
    return [*two_views(N, learnt), torch.randn(N, 4, D, generator=torch.Generator().manual_seed(3))]


def of_own_rows(a: Tensor, rows: Tensor) -> Tensor:
    """The cosines of queries with their own rows, (N, K)."""
    return torch.einsum("nd,nkd->nk", F.normalize(a, dim=1), F.normalize(rows, dim=2))


def own_rows_of_matrix(a: Tensor, b: Tensor, rows: Tensor) -> Tensor:
    cosines = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    return F.cross_entropy(20 * torch.cat([cosines, of_own_rows(a, rows)], 1), torch.arange(len(a)))


def qwen_of_matrices(a: Tensor, b: Tensor, rows: Tensor) -> Tensor:
    """Equations 1 and 2 of Qwen3-Embedding's report."""
    x, y = F.normalize(a, dim=1), F.normalize(b, dim=1)
    pairs = (x * y).sum(1, keepdim=True)
    blocks = [
        z.fill_diagonal_(-torch.inf).masked_fill(z > pairs + 0.1, -torch.inf)
        for z in (x @ y.T, x @ x.T, y @ y.T)
    ]
    own = of_own_rows(a, rows)
    cells = [pairs, *blocks, own.masked_fill(own > pairs + 0.1, -torch.inf)]
    return F.cross_entropy(20 * torch.cat(cells, 1), torch.zeros(len(a), dtype=torch.long))


def qwen(a: Tensor, b: Tensor, rows: Tensor) -> Tensor:
    return fastqt.multiple_negatives_ranking_loss(
        a,
        b,
        row_negatives=rows,
        directions=("query_to_doc", "query_to_query", "doc_to_doc"),
        exclude=fastqt.Margin(0.1),
    )


def debiased_of_matrix(a: Tensor, b: Tensor, tau_plus: float = 0.001) -> Tensor:
    scores = 20 * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    pairs, count = scores.diagonal(), len(a) - 1
    negatives = scores.masked_fill(torch.eye(len(a), dtype=torch.bool), -torch.inf).exp().sum(1)
    estimate = (negatives - tau_plus * count * pairs.exp()) / (1 - tau_plus)
    return torch.log1p(estimate.clamp(min=count * math.exp(-20)) / pairs.exp()).mean()


def dcl_of_matrix(a: Tensor, b: Tensor) -> Tensor:
    pairs, negatives = pairs_and_negatives(a, b, 10.0)
    return (negatives.logsumexp(1) - pairs).mean()


def hcl_of_matrix(a: Tensor, b: Tensor, tau_plus: float = 0.001) -> Tensor:
    pairs, negatives = pairs_and_negatives(a, b, 2.0)
    count = 2 * len(a) - 2
    hard = count * (negatives.softmax(1) * negatives.exp()).sum(1)
    estimate = (hard - tau_plus * count * pairs.exp()) / (1 - tau_plus)
    return torch.log1p(estimate.clamp(min=count * math.exp(-2)) / pairs.exp()).mean()


def sides_of_teacher(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The teacher's queries and candidates."""
    return teacher_of(rows), teacher_of(rows).roll(1, 1)


def softmaxes_of_matrices(a: Tensor, b: Tensor) -> Tensor:
    student, teacher = (
        20 * F.normalize(x, dim=1) @ F.normalize(y, dim=1).T for x, y in ((a, b), sides_of_teacher(a))
    )
    return F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean")


def softmaxes(a: Tensor, b: Tensor) -> Tensor:
    return fastqt.distillation_loss(a, b, *sides_of_teacher(a))


def info_nce_of_matrix(a: Tensor, b: Tensor) -> Tensor:
    scores = 20 * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    return F.cross_entropy(scores, torch.arange(len(a)))


def clip_of_matrix(a: Tensor, b: Tensor) -> Tensor:
    scores, rows = 20 * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T, torch.arange(len(a))
    return (F.cross_entropy(scores, rows) + F.cross_entropy(scores.T, rows)) / 2


def simclr_of_matrix(a: Tensor, b: Tensor) -> Tensor:
    both = F.normalize(torch.cat([a, b]), dim=1)
    scores = (both @ both.T / 0.5).masked_fill(torch.eye(len(both), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(scores, torch.arange(len(both)).roll(len(a)))


def linear_in_chunks() -> Loss:
    """Torch's linear layer and cross-entropy at once, whose classes are the candidates."""
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError("torch has F.linear_cross_entropy from version 2.13 on")
    options = torch.nn.LinearCrossEntropyOptions()

    def loss(a: Tensor, b: Tensor) -> Tensor:
        a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
        return F.linear_cross_entropy(20 * a, b, torch.arange(len(a)), options=options)

    return loss


def siglip_of_matrix(a: Tensor, b: Tensor) -> Tensor:
    scores = 10 * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T - 10
    return -F.logsigmoid((2 * torch.eye(len(a)) - 1).to(a) * scores).sum() / len(a)


def siglip_in_chunks() -> Loss:
    """open_clip's, a thousand images at a time; the scores of all chunks are kept for the backward pass."""
    try:
        return siglip(module_of(OPEN_CLIP.theirs), chunk_size=1024)
    except TypeError as error:
        raise ImportError("this version of open_clip has no SigLIP in chunks") from error


CASES = (
    Case(
        "InfoNCE", two_views, info_nce_of_matrix, linear_in_chunks, partial(fastqt.info_nce_loss, scale=20.0)
    ),
    *(
        Case(f"{name} in the block", two_views, loss, None, fastqt.fused()(loss), most_rows=most_rows)
        for name, loss, most_rows in (
            ("InfoNCE", info_nce_of_matrix, ROWS[-1]),
            ("CLIP", clip_of_matrix, ROWS[-1]),
            ("SimCLR", simclr_of_matrix, 4096),
        )
    ),
    Case(
        "SigLIP",
        two_views,
        siglip_of_matrix,
        siglip_in_chunks,
        partial(fastqt.siglip_loss, scale=10.0, bias=-10.0),
    ),
    Case(
        "CoSENT",
        labelled_pairs,
        cosent_of_matrix,
        partial(ranked_by, "CoSENTLoss"),
        lambda a, b: fastqt.cosent_loss(a, b, labels_of(a)),
    ),
    Case(
        "AnglE",
        labelled_pairs,
        angle_of_matrix,
        partial(ranked_by, "AnglELoss"),
        lambda a, b: fastqt.angle_loss(a, b, labels_of(a)),
    ),
    *(
        Case(
            form,
            labelled_rows,
            partial(triplets_of_matrix, form=form),
            partial(triplets_by, "sentence_transformers.sentence_transformer.losses", form),
            lambda x, form=form: triplets_by("fastqt.integrations.sentence_transformers", form)(x),
            most_rows=4096,
        )
        for form in (
            "BatchAllTripletLoss",
            "BatchSemiHardTripletLoss",
            "BatchHardTripletLoss",
            "BatchHardSoftMarginTripletLoss",
        )
    ),
    Case("spread-out (GOR)", spread_rows, moments_of_matrix, regularised, fastqt.spread_out_loss),
    Case(
        "distillation of scores",
        taught_rows,
        distilled_by_matrices,
        None,
        lambda x: fastqt.similarity_distillation_loss(x, teacher_of(x)),
    ),
    Case("distillation of softmaxes", two_views, softmaxes_of_matrices, None, softmaxes, most_rows=4096),
    Case(
        "InfoNCE, own negatives",
        with_own_rows,
        own_rows_of_matrix,
        None,
        lambda a, b, rows: fastqt.info_nce_loss(a, b, row_negatives=rows),
        most_rows=4096,
    ),
    Case("Qwen3-Embedding", with_own_rows, qwen_of_matrices, None, qwen, most_rows=4096),
    Case(
        "InfoNCE, debiased",
        two_views,
        debiased_of_matrix,
        None,
        partial(fastqt.info_nce_loss, tau_plus=0.001),
        most_rows=4096,
    ),
    Case("DCL", two_views, dcl_of_matrix, None, fastqt.dcl_loss, most_rows=4096),
    Case(
        "HCL",
        two_views,
        hcl_of_matrix,
        None,
        partial(fastqt.hcl_loss, tau_plus=0.001),
        most_rows=4096,
    ),
)


def steps_of(case: Case, N: int) -> dict[str, Callable[[Sequence[Tensor]], Step]]:
    """How each side's step is made from leaves; the matrix is left out where it is too large."""
    losses: dict[str, Callable[[], Loss]] = {"ours": lambda: case.ours}
    if N * N <= MOST_CELLS:
        losses["matrix"] = lambda: case.matrix
    if case.theirs is not None:
        losses["theirs"] = case.theirs
    return {name: partial(_step, losses[name]) for name in SIDES if name in losses}


def _step(make: Callable[[], Loss], leaves: Sequence[Tensor]) -> Step:
    return step_of(make(), leaves)


def measured(case: Case, N: int) -> dict[str, Any]:
    """Time and memory of all sides, in turns."""
    leaves = [x.requires_grad_() for x in case.inputs(N, False)]
    results = in_turns(steps_of(case, N), leaves, Clock(torch.device("cpu")), EFFORT)
    row: dict[str, Any] = {"case": case.label, "N": N}
    for name, result in results.items():
        kept = {"seconds": result.seconds, "peak_bytes": result.peak_bytes, "reason": result.reason}
        row[name] = {key: value for key, value in kept.items() if value is not None}
    return row


def errors(case: Case) -> dict[str, list[float] | str]:
    """The relative error of the loss, and that of all gradients together."""
    inputs = case.inputs(ERROR_ROWS, True)
    exact = [x.double().requires_grad_() for x in inputs]
    value, *gradients = step_of(case.matrix, exact)(0)
    wanted = value, torch.cat([x.flatten() for x in gradients])
    by_side: dict[str, list[float] | str] = {}
    for name, make in steps_of(case, ERROR_ROWS).items():
        try:
            value, *gradients = make([x.clone().requires_grad_() for x in inputs])(0)
        except ImportError as error:  # the peer is absent: the error is its result
            by_side[name] = str(error)
            continue
        pairs = zip((value, torch.cat([x.flatten() for x in gradients])), wanted, strict=True)
        by_side[name] = [float((x.double() - y).norm() / y.norm()) for x, y in pairs]
    return by_side


def stored() -> dict[str, Any]:
    return json.loads(STORED.read_text())


def speed_table(rows: Iterable[dict[str, Any]]) -> str:
    header = ("loss", "N", *(f"{side} ms" for side in SIDES), *(f"{side} MiB" for side in SIDES))

    def figure(row: dict[str, Any], side: str, key: str, unit: float, digits: int) -> str:
        value = row.get(side, {}).get(key)
        return "–" if value is None else f"{value / unit:,.{digits}f}"

    def line(row: dict[str, Any]) -> tuple[str, ...]:
        times = (figure(row, side, "seconds", 1e-3, 1) for side in SIDES)
        peaks = (figure(row, side, "peak_bytes", 2**20, 0) for side in SIDES)
        return row["case"], f"{row['N']:,}", *times, *peaks

    return table(header, map(line, rows))


def error_table(rows: Iterable[dict[str, Any]]) -> str:
    header = ("loss", *(f"{side}, {what}" for side in SIDES for what in ("loss", "gradients")))

    def line(row: dict[str, Any]) -> tuple[str, ...]:
        sides = (row.get(side) for side in SIDES)
        both = (x if isinstance(x, list) else (None, None) for x in sides)
        return row["case"], *("–" if x is None else f"{x:.1e}" for pair in both for x in pair)

    return table(header, map(line, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures losses of a whole batch beside their formulas.")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="the numbers of rows, N")
    parser.add_argument("--write", action="store_true", help=f"store {STORED.name}")
    parser.add_argument("--only", default="", help="the losses whose labels have this text")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))

    versions = {"sentence-transformers": importlib.metadata.version("sentence-transformers")}
    versions[OPEN_CLIP.name] = installed()[OPEN_CLIP.name]
    run = {"machine_info": processor_and_versions(), "versions": versions, "D": D}
    others = others_of(run) if options.only and options.write else {"found": [], "errors": []}

    cases = [case for case in CASES if options.only in case.label]
    of_learnt = [{"case": case.label, **errors(case)} for case in cases]
    print(error_table(of_learnt), flush=True)
    rows = []
    for case in cases:
        for N in sorted(N for N in options.rows if case.most_rows >= N):
            rows.append(measured(case, N))
            print(json.dumps(rows[-1]), flush=True)
    if options.write:
        run |= {"found": joined(others["found"], rows), "errors": joined(others["errors"], of_learnt)}
        STORED.write_text(json.dumps(run, indent=1) + "\n")
    print(speed_table(rows))


def others_of(run: dict[str, Any]) -> dict[str, Any]:
    """The stored run, if it is of the same machine and versions; otherwise nothing can be added to it."""
    of_machine, before = ({**each["machine_info"], "date": None} for each in (run, stored()))
    if of_machine != before or run["versions"] != stored()["versions"]:
        raise SystemExit(f"{STORED.name} is of another machine or of other versions: measure all losses")
    return stored()


def joined(stored_rows: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the order of CASES; those of a case that is measured anew take the place of the stored ones."""
    anew = {row["case"] for row in rows}
    every = [row for row in stored_rows if row["case"] not in anew] + rows
    return [row for case in CASES for row in every if row["case"] == case.label]


if __name__ == "__main__":
    main()
