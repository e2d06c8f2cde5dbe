"""Renders the tables and the plot of README and docs from stored runs, so that no figure is typed by hand.

python -m benchmarks.measure.render    # writes PAGES and benchmarks/results/loss.svg
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import peers, peers_trainer
from benchmarks.measure.learning import (
    evaluation_table,
    gloss_inference_table,
    gloss_table,
    learning_table,
    seeds_table,
    stored_text,
)
from benchmarks.measure.tables import table
from benchmarks.papers import pages
from benchmarks.paths import RESULTS, ROOT
from benchmarks.peers_distributed import conventions_machine, conventions_table, stored_peers
from benchmarks.predict import scaling
from benchmarks.predict.summary import predictions_table

README = ROOT / "README.md"
PAGES = (
    README,
    *(ROOT / "docs" / f"{name}.md" for name in ("benchmarks", "trainings", "distributed", "peers", "papers")),
)
MIB = 2**20

Run = dict[str, Any]


def newest_run() -> Run:
    """The latest stored run of the benchmarks, by the date in its name."""
    return json.loads(max(RESULTS.glob("*-????-??-??.json"), key=lambda path: path.stem[-10:]).read_text())


def rows_of(run: Run, test: str) -> list[dict[str, Any]]:
    """What each benchmark of a test recorded, with its median time as `seconds`."""
    found = [b for b in run["benchmarks"] if b["name"].split("[")[0] == test]
    return [{**b["extra_info"], "seconds": b["stats"]["median"]} for b in found]


def milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:,.1f}"


def mebibytes(size: float | None) -> str:
    return "–" if size is None else f"{max(size, 0) / MIB:,.0f}"


def times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f} ×"


def machine(run: Run) -> str:
    m = run["machine_info"]
    return (
        f"{m['cpu']}, {m['threads']} threads, {m['system']}, Python {m['python_version']}, "
        f"torch {m['torch_version']}, {run['datetime'][:10]}"
    )


LOSS_HEADER = ("fastqt ms", "× GEMMs", "eager × GEMMs", "fastqt MiB", "eager MiB")


def loss_figures(r: dict[str, Any]) -> tuple[str, ...]:
    return (
        milliseconds(r["seconds"]),
        times(r["ratio_to_gemm"]),
        times(r["eager_ratio_to_gemm"]),
        mebibytes(r["peak_above_gradients"]),
        mebibytes(r["eager_peak_above_gradients"]),
    )


def loss_table(run: Run) -> str:
    rows = sorted(rows_of(run, "test_loss"), key=lambda r: (r["memory"], r["N"], r["D"]))
    return table(
        ("N", "D", "memory", *LOSS_HEADER),
        ((f"{r['N']:,}", f"{r['D']:,}", r["memory"], *loss_figures(r)) for r in rows),
    )


def family_table(run: Run) -> str:
    return table(
        ("loss", "N", "M", "D", *LOSS_HEADER),
        (
            (f"`{r['loss']}`", f"{r['N']:,}", f"{r['M']:,}", f"{r['D']:,}", *loss_figures(r))
            for r in rows_of(run, "test_family")
        ),
    )


def bfloat16_table(run: Run) -> str:
    return table(
        ("loss", "memory", "N", "D", "fastqt ms", "× GEMMs", "eager × GEMMs", "fastqt in float32 × GEMMs"),
        (
            (
                *(f"`{r['loss']}`", r["memory"], f"{r['N']:,}", f"{r['D']:,}", milliseconds(r["seconds"])),
                *(times(r[f"{of}ratio_to_gemm"]) for of in ("", "eager_", "float32_")),
            )
            for r in rows_of(run, "test_bfloat16")
        ),
    )


def bfloat16_error_table(run: Run) -> str:
    return table(
        ("embeddings", "N", "D", "fastqt", "eager"),
        (
            (
                r["state"],
                f"{r['N']:,}",
                f"{r['D']:,}",
                *(f"{r['gradient_errors'][x]:.1e}" for x in ("fastqt", "eager")),
            )
            for r in rows_of(run, "test_bfloat16_error")
        ),
    )


def products_table(run: Run) -> str:
    return table(
        ("oneDNN", "bfloat16, times as fast as float32"),
        (
            (r["level"], times(r["float32_seconds"] / r["bfloat16_seconds"]))
            for r in rows_of(run, "test_products")
        ),
    )


def gru_table(run: Run) -> str:
    header = ("GRU", "fastqt ms", "× GEMMs", "torch.nn.GRU × GEMMs", "faster")
    return table(
        header,
        (
            (
                f"H={r['H']:,}, {'bidirectional' if r['bidirectional'] else 'one direction'}, "
                f"reset {'after' if r['reset_after'] else 'before'}",
                milliseconds(r["seconds"]),
                times(r["ratio_to_gemm"]),
                times(r["torch_ratio_to_gemm"]),
                times(r["speedup_over_torch"]),
            )
            for r in rows_of(run, "test_gru_forward_and_backward")
            if r["torch_seconds"] is not None
        ),
    )


def training_step_table(run: Run) -> str:
    header = ("encoder", "N", "fastqt sentences/s", "plain PyTorch sentences/s", "faster")
    return table(
        header,
        (
            (
                f"GRU, H={r['hidden_size']:,}" if r["hidden_size"] else f"bag of words, {r['word_dim']}-d",
                f"{r['N']:,}",
                f"{r['sentences_per_second']:,.0f}",
                f"{r['plain_sentences_per_second']:,.0f}",
                times(r["times_faster"]),
            )
            for r in rows_of(run, "test_training_step")
        ),
    )


LAYERS = {
    "empty": "an autograd function that does nothing, forward and backward",
    "call": "`contrastive_loss`, forward and backward",
    "forward": "its forward",
    "problem": "of which checks and targets",
    "function": "… the autograd function",
    "engine": "… its engine",
    "operator": "… the operator",
    "products": "… three matrix products",
}


def call_table(run: Run) -> str:
    (found,) = rows_of(run, "test_call")
    return table(
        ("at N=8, D=8", "µs"),
        ((title, f"{found['microseconds'][name]:.0f}") for name, title in LAYERS.items()),
    )


def efficiency_table(run: Run) -> str:
    header = ("H", "V", "QuickThoughts sentences/s", "skip-thoughts sentences/s", "faster")
    return table(
        header,
        (
            (
                f"{r['H']:,}",
                f"{r['V']:,}",
                f"{r['sentences_per_second']:,.0f}",
                f"{r['skip_thoughts_sentences_per_second']:,.0f}",
                times(r["times_faster"]),
            )
            for r in rows_of(run, "test_quickthoughts_beside_skip_thoughts")
        ),
    )


TABLE_STEPS = {
    "test_bag_forward_and_backward": "sums of words, forward and backward",
    "test_distinct_rows": "a gradient without repeated rows",
    "test_step_of_all_rows": "gradient, clipping and Adam",
    "test_step_of_used_rows": "gradient and Adam, the rows of the batch only",
    "test_step_of_a_gru": "clipping and Adam, a GRU",
}


def tables_table(run: Run) -> str:
    def shown(count: int | None) -> str:
        return "–" if count is None else f"{count:,}"

    return table(
        ("work", "V", "D", "B", "fastqt ms", "beside", "faster"),
        (
            (
                title,
                shown(r.get("V")),
                shown(r.get("D", r.get("H"))),
                shown(r.get("B")),
                milliseconds(r["seconds"]),
                name,
                times(faster),
            )
            for test, title in TABLE_STEPS.items()
            for r in rows_of(run, test)
            for name, faster in r["times_faster"].items()
        ),
    )


def passes_table(run: Run) -> str:
    found = [r["nanoseconds"] for r in rows_of(run, "test_passes")]
    builds = list(found[0]) if found else []
    return table(
        ("pass", *builds),
        ((name, *(f"{r[build][name]:.3f}" for build in builds)) for r in found for name in r["clones"]),
    )


def stored_logistic() -> Run:
    """The run of benchmarks/bench_logistic.py, which is stored on its own."""
    return json.loads((RESULTS / "logistic.json").read_text())


def logistic_table(run: Run) -> str:
    header = ("protocol", "n", "d", "classes", "fits", "solver", "CPU seconds", "fastqt faster", "excess")
    rows = []
    for r in rows_of(run, "test_logistic"):
        fits = r["training_sets"] * len(r["grid"])
        shape = r["protocol"], f"{r['n']:,}", f"{r['d']:,}", f"{r['classes']}", f"{fits:,}"
        rows.append((*shape, "fastqt", f"{r['fastqt_seconds']:,.1f}", "–", f"{r['excess']:.0e}"))
        for name, peer in r["peers"].items():
            found = f"{peer['seconds']:,.1f}", times(peer["times_faster"]), f"{peer['excess']:.0e}"
            rows.append((*shape, name, *found))
    return table(header, rows)


def stored_distributed() -> list[Run]:
    """The runs of benchmarks/bench_distributed.py, which are stored on their own, by loss and ranks."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("distributed-*.json"))]


def distributed_table(runs: list[Run]) -> str:
    header = ("loss", "ranks", "exchange", "CPU seconds", "× one process", "MiB a rank", "predicted MiB")
    rows = []
    for r in (r for run in runs for r in rows_of(run, "test_distributed")):
        name, seconds = f"`{r['loss']}`", r["cpu_seconds_alone"]
        if r["size"] == 2:
            rows.append((name, "1", "–", f"{seconds:.2f}", "–", mebibytes(r["peak_alone"]), "–"))
        for exchange, found in r["exchanges"].items():
            figures = f"{found['cpu_seconds']:.2f}", times(found["ratio_to_one"])
            memory = (mebibytes(found[key]) for key in ("peak_above_gradients", "predicted_peak"))
            rows.append((name, f"{r['size']}", exchange, *figures, *memory))
    return table(header, rows)


def inference_table(run: Run) -> str:
    header = (
        "decoder",
        "sentences",
        "steps",
        "V",
        "d",
        "fastqt ms",
        "× GEMMs",
        "eager × GEMMs",
        "fastqt MiB",
        "eager MiB",
    )
    return table(
        header,
        (
            (
                r["decoder"],
                f"{r['sentences']:,}",
                f"{r['steps']:,}",
                f"{r['V']:,}",
                f"{r['D']:,}",
                milliseconds(r["seconds"]),
                times(r["ratio_to_gemm"]),
                times(r.get("eager_ratio_to_gemm")),
                mebibytes(r.get("peak")),
                mebibytes(r.get("eager_peak")),
            )
            for r in rows_of(run, "test_inference_step") + rows_of(run, "test_inference")
        ),
    )


def sections(run: Run) -> dict[str, Callable[[], str]]:
    predicted = {name: partial(render, scaling.stored()) for name, render in scaling.TABLES.items()}
    return {
        **predicted,
        **{f"papers {name}": section for name, section in pages.SECTIONS.items()},
        "conventions": lambda: conventions_table(stored_peers()["found"]),
        "conventions machine": lambda: conventions_machine(stored_peers()),
        "peers": lambda: peers.speed_table(peers.stored()["found"]),
        "peers errors": lambda: peers.error_table(peers.stored()["errors"]),
        "peers machine": lambda: peers.machine_line(peers.stored()),
        "peers trainer": lambda: peers_trainer.speed_table(peers_trainer.stored()["speed"]["found"]),
        "peers curves": lambda: peers_trainer.equality_line(peers_trainer.stored()["equality"]["found"]),
        "machine": lambda: machine(run),
        "loss": lambda: loss_table(run),
        "family": lambda: family_table(run),
        "bfloat16": lambda: bfloat16_table(run),
        "bfloat16 error": lambda: bfloat16_error_table(run),
        "products": lambda: products_table(run),
        "gru": lambda: gru_table(run),
        "training step": lambda: training_step_table(run),
        "call": lambda: call_table(run),
        "efficiency": lambda: efficiency_table(run),
        "inference": lambda: inference_table(run),
        "tables": lambda: tables_table(run),
        "passes": lambda: passes_table(run),
        "logistic": lambda: logistic_table(stored_logistic()),
        "logistic machine": lambda: machine(stored_logistic()),
        "distributed": lambda: distributed_table(stored_distributed()),
        "distributed machine": lambda: machine(stored_distributed()[0]),
        "predictions": predictions_table,
        "bow": lambda: learning_table("quickthoughts-bow"),
        "gru training": lambda: learning_table("quickthoughts-gru"),
        "evaluation": evaluation_table,
        "seeds": seeds_table,
        "gloss": gloss_table,
        "gloss inference": gloss_inference_table,
        "interpolation": lambda: stored_text("gloss-interpolation.txt"),
        "neighbours": lambda: stored_text("quickthoughts-bow/neighbours.txt"),
    }


def rendered(text: str) -> str:
    """A page in which the text between each pair of markers is rendered anew."""
    known = sections(newest_run())

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- results: {name} -->\n{known[name]()}\n<!-- end -->"

    return re.sub(r"<!-- results: (?P<name>[\w ]+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def plot(run: Run, path: Path) -> None:
    """Time and peak memory over N at D=768."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fastqt"
    from matplotlib import pyplot

    rows = sorted(
        (r for r in rows_of(run, "test_loss") if r["D"] == 768 and r["memory"] == "fast"),
        key=lambda r: r["N"],
    )
    figure, (time, memory) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    N = [r["N"] for r in rows]
    time.loglog(N, [r["seconds"] for r in rows], "o-", label="fastqt")
    time.loglog(N, [r["eager_seconds"] for r in rows], "s-", label="eager PyTorch")
    time.loglog(N, [r["gemm_seconds"] for r in rows], "k:", label="its three GEMMs")
    time.set(xlabel="N", ylabel="seconds, forward and backward", title="time")
    for key, style, label in (
        ("peak_above_gradients", "o-", "fastqt"),
        ("eager_peak_above_gradients", "s-", "eager PyTorch"),
    ):
        memory.loglog(N, [max(r[key], 4096) / MIB for r in rows], style, label=label)
    memory.set(xlabel="N", ylabel="MiB above inputs and gradients", title="memory")
    for axes in (time, memory):
        axes.set_xticks(N, [f"{n:,}" for n in N], rotation=30)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    for page in PAGES:
        page.write_text(rendered(page.read_text()))
    plot(newest_run(), RESULTS / "loss.svg")
    print(f"rendered {', '.join(page.name for page in PAGES)} and loss.svg", file=sys.stderr)


if __name__ == "__main__":
    main()
