"""Losses of the libraries that fastqt stands in for, theirs and ours side by side on the same embeddings.

python -m benchmarks.peers                    # measures and prints the tables; a quarter of an hour
python -m benchmarks.peers --write            # stores benchmarks/results/peers.json as well
python -m benchmarks.peers --rows 512         # one size alone

Each loss of a peer is made by the peer's own class and by the class of fastqt.integrations that takes its
place, and both are given the same leaves. A step is the loss and its gradients. Errors are those of the
gradients in float32, to the peer's own loss in float64, for pairs so close that the loss is nearly 0.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import math
import resource
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure.machine import processor_and_versions
from benchmarks.measure.tables import table
from benchmarks.measure.timing import Clock, Effort, Result, Step, in_turns
from benchmarks.paths import RESULTS

STORED = RESULTS / "peers.json"
ROWS, D = (512, 2048, 8192), 384  # the widths of MiniLM
ERROR_ROWS = 512
ROWS_A_LABEL = 4
MOST_MEMORY = 18 * 2**30  # bytes of addresses: an allocation beyond fails, and that is the peer's result
PATIENCE = 30.0  # seconds of a step
EFFORT = Effort(warm_ups=1, least_rounds=3, seconds=6.0)

Loss = Callable[..., Tensor]  # of the columns' embeddings, (N, D) each


class Library(NamedTuple):
    """A peer: the modules that hold its classes and ours, and the distribution that has its version."""

    name: str
    theirs: str
    ours: str


SENTENCE_TRANSFORMERS = Library(
    "sentence-transformers",
    "sentence_transformers.sentence_transformer.losses",
    "fastqt.integrations.sentence_transformers",
)
OPEN_CLIP = Library("open_clip_torch", "open_clip.loss", "fastqt.integrations.open_clip")
METRIC_LEARNING = Library(
    "pytorch-metric-learning", "pytorch_metric_learning.losses", "fastqt.integrations.metric_learning"
)


class Case(NamedTuple):
    """A loss of a peer.

    Attributes:
        label: what the tables call it.
        columns: how many embeddings a row has.
        make: makes the loss from a module that has the class.
        converged: how far embeddings of a row are apart for a loss of about 1e-6.
    """

    label: str
    library: Library
    columns: int
    make: Callable[[ModuleType], Loss]
    converged: float = 0.02


class Given(nn.Module):
    """A model of sentence-transformers whose features hold the embeddings already."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = _tokenizer()
        self.max_seq_length = 1

    def __getitem__(self, index: int) -> nn.Module:
        return self

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["given"]}


def ranking(module: ModuleType, **options: Any) -> Loss:
    loss = module.MultipleNegativesRankingLoss(Given(), **options)
    return lambda *columns: loss.compute_loss_from_embeddings(list(columns), None)


def cached_ranking(module: ModuleType, **options: Any) -> Loss:
    """The stage of the gradient cache that computes the loss and the embeddings' gradients."""
    loss = module.CachedMultipleNegativesRankingLoss(Given(), **options)
    return lambda *columns: loss.calculate_loss([[x] for x in columns], with_backward=True)


def gist(module: ModuleType) -> Loss:
    """The guide is the model itself, whose embeddings are taken without gradients."""
    loss = module.GISTEmbedLoss(Given(), Given())
    return lambda *columns: loss([{"given": x} for x in columns], None)


def cached_gist(module: ModuleType) -> Loss:
    loss = module.CachedGISTEmbedLoss(Given(), Given())

    def computed(*columns: Tensor) -> Tensor:
        of_guide = [[x.detach()] for x in columns]
        return loss.calculate_loss([[x] for x in columns], of_guide, with_backward=True)

    return computed


def clip(module: ModuleType) -> Loss:
    loss = module.ClipLoss()
    return lambda a, b: loss(F.normalize(a), F.normalize(b), torch.tensor(100.0, dtype=a.dtype))


def siglip(module: ModuleType, **options: Any) -> Loss:
    loss = module.SigLipLoss(**options)

    def computed(a: Tensor, b: Tensor) -> Tensor:
        scale, bias = (torch.tensor(x, dtype=a.dtype) for x in (10.0, -10.0))
        return loss(F.normalize(a), F.normalize(b), scale, bias)

    return computed


def of_labels(name: str, module: ModuleType) -> Loss:
    """Consecutive rows share a label."""
    loss = getattr(module, name)(temperature=0.05)
    return lambda x: loss(x, torch.arange(len(x)) // ROWS_A_LABEL)


ALL_DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
SYMMETRIC = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
HARDNESS = {"hardness_mode": "all_negatives", "hardness_strength": 5.0}
CASES = (
    Case("MultipleNegativesRankingLoss, pairs", SENTENCE_TRANSFORMERS, 2, ranking),
    Case("… triplets", SENTENCE_TRANSFORMERS, 3, ranking),
    Case("… symmetric, pairs", SENTENCE_TRANSFORMERS, 2, partial(ranking, **SYMMETRIC)),
    Case("… four directions, pairs", SENTENCE_TRANSFORMERS, 2, partial(ranking, directions=ALL_DIRECTIONS)),
    Case("… hardness of all negatives, triplets", SENTENCE_TRANSFORMERS, 3, partial(ranking, **HARDNESS)),
    Case("CachedMultipleNegativesRankingLoss, pairs", SENTENCE_TRANSFORMERS, 2, cached_ranking),
    Case("GISTEmbedLoss, pairs", SENTENCE_TRANSFORMERS, 2, gist, 1.2),
    Case("CachedGISTEmbedLoss, pairs", SENTENCE_TRANSFORMERS, 2, cached_gist, 1.2),
    Case("ClipLoss", OPEN_CLIP, 2, clip, 1.4),
    Case("SigLipLoss", OPEN_CLIP, 2, siglip),
    Case("SupConLoss", METRIC_LEARNING, 1, partial(of_labels, "SupConLoss")),
    Case("NTXentLoss", METRIC_LEARNING, 1, partial(of_labels, "NTXentLoss")),
)


def columns_of(case: Case, N: int, spread: float = 2.0) -> list[Tensor]:
    """Embeddings (N, D), one for each column; those of a row, or of a label, differ by `spread`."""
    generator = torch.Generator().manual_seed(0)
    together = ROWS_A_LABEL if case.columns == 1 else 1
    common = torch.randn(N // together, D, generator=generator).repeat_interleave(together, 0)
    columns = [torch.randn(N, D, generator=generator) for _ in range(case.columns)]
    pair, negatives = columns[:2], columns[2:]
    return [common + spread * x for x in pair] + negatives


def step_of(loss: Loss, leaves: Sequence[Tensor]) -> Step:
    """Computes the loss and the gradients of the leaves, whichever way the loss takes them."""

    def step(_: int) -> list[Tensor]:
        for x in leaves:
            x.grad = None
        value = loss(*leaves)
        if value.requires_grad:
            value.backward()
        return [value.detach(), *(x.grad for x in leaves)]

    return step


def steps_of(case: Case) -> dict[str, Callable[[list[Tensor]], Step]]:
    """How the peer's step and ours are made from leaves."""

    def made(name: str, leaves: list[Tensor]) -> Step:
        return step_of(case.make(module_of(name)), leaves)

    return {"theirs": partial(made, case.library.theirs), "ours": partial(made, case.library.ours)}


def measured(case: Case, N: int, before: dict[str, Any] | None) -> dict[str, Any]:
    """Time and memory of both, in turns.

    Args:
        before: what was measured with fewer rows. What would take too long by that, as times grow with the
            square of N, is left out.
    """
    leaves = [x.requires_grad_() for x in columns_of(case, N)]
    steps, late = steps_of(case), {}
    for name in list(steps) if before else ():
        seconds = before[name].get("seconds", math.inf) * (N / before["N"]) ** 2
        if seconds > PATIENCE:
            late[name] = Result(reason=before[name].get("reason", f"a step would take {seconds:,.0f} s"))
            del steps[name]
    results = {**in_turns(steps, leaves, Clock(torch.device("cpu")), EFFORT), **late}
    return {"case": case.label, "N": N, **{name: _stored(results[name]) for name in ("theirs", "ours")}}


def gradient_errors(case: Case) -> dict[str, float | str]:
    """‖g - r‖ / ‖r‖ of all leaves' gradients together, r the peer's in float64; or why there is none."""
    columns = columns_of(case, ERROR_ROWS, case.converged)
    exact = [x.double().requires_grad_() for x in columns]
    leaves = [x.clone().requires_grad_() for x in columns]
    steps = steps_of(case)
    try:
        reference = torch.cat([x.flatten() for x in steps["theirs"](exact)(0)[1:]])
    except Exception as error:  # a peer, absent or unable: the error is its result
        return {"reason": _reason(error)}
    errors: dict[str, float | str] = {}
    for name, make in steps.items():
        gradient = torch.cat([x.double().flatten() for x in make(leaves)(0)[1:]])
        errors[name] = float((gradient - reference).norm() / reference.norm())
    return errors


def module_of(name: str) -> ModuleType:
    """A module by its name; open_clip's losses without the rest of it, which needs torchvision."""
    package = importlib.util.find_spec("open_clip") if name == "open_clip.loss" else None
    if package is None or package.origin is None:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, Path(package.origin).with_name("loss.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _stored(result: Result) -> dict[str, Any]:
    kept = {name: value for name, value in asdict(result).items() if value is not None}
    return {
        name: kept[name] for name in ("seconds", "rounds", "peak_bytes", "loss", "reason") if name in kept
    }


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]


def _tokenizer() -> Any:
    """A tokenizer of a few bytes; a guided loss compares those of the model and of the guide."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"?": 0}, unk_token="?")))


def stored() -> dict[str, Any]:
    return json.loads(STORED.read_text())


def machine_line(run: dict[str, Any]) -> str:
    m = run["machine_info"]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return (
        f"{m['cpu']}, {m['threads']} threads, {m['system']}, Python {m['python_version']}, "
        f"torch {m['torch_version']}, {versions}, {m['date']}"
    )


def speed_table(rows: Iterable[dict[str, Any]]) -> str:
    header = ("loss", "N", "theirs ms", "ours ms", "faster", "theirs MiB", "ours MiB")

    def row(r: dict[str, Any]) -> tuple[str, ...]:
        sides = r["theirs"], r["ours"]
        seconds = [side.get("seconds") for side in sides]
        faster = f"{seconds[0] / seconds[1]:.2f} ×" if None not in seconds else "–"
        shown = ("–" if s is None else f"{s * 1e3:,.1f}" for s in seconds)
        peaks = (f"{s['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in s else "–" for s in sides)
        return r["case"], f"{r['N']:,}", *shown, faster, *peaks

    return table(header, map(row, rows))


def error_table(rows: Iterable[dict[str, Any]]) -> str:
    return table(
        ("loss", "theirs", "ours"),
        ((r["case"], *(f"{r[side]:.1e}" if side in r else "–" for side in ("theirs", "ours"))) for r in rows),
    )


def versions() -> dict[str, str]:
    """Of the peers that are installed."""
    installed = {}
    for library in dict.fromkeys(case.library for case in CASES):
        try:
            installed[library.name] = importlib.metadata.version(library.name)
        except importlib.metadata.PackageNotFoundError:
            installed[library.name] = "not installed"
    return installed


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the losses of other libraries beside ours.")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="the numbers of rows, N")
    parser.add_argument("--write", action="store_true", help=f"store {STORED.name}")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    errors = [{"case": case.label, **gradient_errors(case)} for case in CASES]
    print(error_table(errors), flush=True)
    rows = []
    for case in CASES:
        before = None
        for N in sorted(options.rows):
            before = measured(case, N, before)
            rows.append(before)
            print(json.dumps(rows[-1]), flush=True)
    if options.write:
        run = {"machine_info": processor_and_versions(), "versions": versions(), "D": D}
        STORED.write_text(json.dumps({**run, "found": rows, "errors": errors}, indent=1) + "\n")
    print(speed_table(rows))


if __name__ == "__main__":
    main()
