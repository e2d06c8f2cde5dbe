"""How exact the gradients of InfoNCE are as it converges: fastqt, and plain PyTorch in float32 and float64.

python -m benchmarks.exactness            # prints the table
python -m benchmarks.exactness --write    # stores benchmarks/results/exactness.json and draws exactness.svg

Each query lies close to its own candidate, and the scale rises, so that the loss falls towards 0. The truth
is computed in float64 from sums of positive numbers alone: 1 - p of a row is the sum of the others' p.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fastqt
from benchmarks.measure.machine import processor_and_versions
from benchmarks.measure.tables import table
from benchmarks.paths import RESULTS

STORED = RESULTS / "exactness.json"
N, D = 512, 256
SCALES = (*range(4, 41, 2),)
NAMES = {
    "fastqt": "fastqt, float32",
    "eager": "plain PyTorch, float32",
    "eager_float64": "plain PyTorch, float64",
}


def pairs() -> tuple[Tensor, Tensor]:
    """Queries and their candidates, (N, D) at norm 1 in float32."""
    generator = torch.Generator().manual_seed(0)
    queries, noise = torch.randn(2, N, D, generator=generator)
    return F.normalize(queries), F.normalize(queries + 0.02 * noise)


def truth(queries: Tensor, candidates: Tensor, scale: float) -> tuple[float, Tensor]:
    """The loss and its gradient with respect to the queries, in float64 and without a cancellation."""
    f, g = queries.double(), candidates.double()
    scores = scale * f @ g.T
    positives = scores.diagonal()
    odds = (scores - positives[:, None]).exp().fill_diagonal_(0)  # p_j / p_i of the other candidates
    total = odds.sum(1, keepdim=True)
    others = odds / (1 + total)
    gradient = scale / len(f) * (others @ g - others.sum(1, keepdim=True) * g)
    return float(total.log1p().mean()), gradient


def eager(queries: Tensor, candidates: Tensor, scale: float) -> Tensor:
    labels = torch.arange(len(queries))
    return F.cross_entropy(scale * queries @ candidates.T, labels)


def ours(queries: Tensor, candidates: Tensor, scale: float) -> Tensor:
    return fastqt.info_nce_loss(queries, candidates, scale=scale, normalize=False)


def measured(queries: Tensor, candidates: Tensor, scale: float) -> dict[str, Any]:
    """The true loss, and the relative error of each gradient: |x - truth| / |truth|."""
    loss, reference = truth(queries, candidates, scale)
    errors = {}
    for name, function in (("fastqt", ours), ("eager", eager), ("eager_float64", eager)):
        dtype = torch.float64 if name == "eager_float64" else torch.float32
        leaf = queries.to(dtype).requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf, candidates.to(dtype), scale), leaf)
        errors[name] = float((gradient.double() - reference).norm() / reference.norm())
    return {"scale": scale, "loss": loss, "errors": errors}


def stored() -> dict[str, Any]:
    return json.loads(STORED.read_text())


def errors_table(run: dict[str, Any]) -> str:
    """A line for every third scale."""
    return table(
        ("scale", "loss", *NAMES.values()),
        (
            (f"{r['scale']}", f"{r['loss']:.1e}", *(f"{r['errors'][name]:.1e}" for name in NAMES))
            for r in run["found"][::3]
        ),
    )


def machine_line(run: dict[str, Any]) -> str:
    m = run["machine_info"]
    threads = f"{m['threads']} thread{'' if m['threads'] == 1 else 's'}"
    return (
        f"N={run['N']}, D={run['D']}; {m['cpu']}, {threads}, Python {m['python_version']}, "
        f"torch {m['torch_version']}, {m['date']}"
    )


def plot(run: dict[str, Any], path: Path) -> None:
    """The errors over the loss, which falls from left to right."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fastqt"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    losses = [r["loss"] for r in run["found"]]
    for (name, label), style in zip(NAMES.items(), ("o-", "s-", "k:"), strict=True):
        axes.loglog(losses, [r["errors"][name] for r in run["found"]], style, label=label)
    axes.set(xlabel="loss (InfoNCE)", ylabel="relative error of the gradient")
    axes.invert_xaxis()
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures how exact gradients are as a loss converges.")
    parser.add_argument("--write", action="store_true", help=f"store {STORED.name} and draw its plot")
    options = parser.parse_args()
    rows = [measured(*pairs(), scale) for scale in SCALES]
    run = {"machine_info": processor_and_versions(), "N": N, "D": D, "found": rows}
    if options.write:
        STORED.write_text(json.dumps(run, indent=1) + "\n")
        plot(run, STORED.with_suffix(".svg"))
    print(errors_table(run))


if __name__ == "__main__":
    main()
