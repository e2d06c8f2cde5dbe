"""Renders the tables and the plot of README and docs from stored runs, so that no figure is typed by hand.

python -m benchmarks.render    # writes PAGES, the plots and the curves of the papers
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import (
    allocator,
    counters_table,
    exactness,
    headline,
    peers,
    peers_trainer,
    peers_whole_batch,
    precision,
    predict,
    quantization,
    static_trainer,
)
from benchmarks.measure.learning import (
    evaluation_table,
    gloss_inference_table,
    gloss_table,
    learning_table,
    neighbours_text,
    retrieval_sentence,
    retrieval_table,
    seeds_table,
    stored_text,
)
from benchmarks.measure.run_tables import (
    MIB,
    TABLES,
    Run,
    bfloat16_table,
    distributed_table,
    logistic_table,
    machine,
    margin_table,
    matryoshka_table,
    peak_table,
    products_table,
    rows_of,
    splade_table,
    torch_engine_table,
)
from benchmarks.offline import amd, losses_on_gpu, small_nvidia
from benchmarks.papers import claims, curves, pages
from benchmarks.paths import RESULTS, ROOT
from benchmarks.peers_distributed import conventions_machine, conventions_table, stored_peers

README = ROOT / "README.md"
PAGES = (
    README,
    *(ROOT / "docs" / f"{name}.md" for name in ("benchmarks", "trainings", "distributed", "peers", "papers")),
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("index", "concepts", "evaluation", "gallery", "devices", "kernels")
    ),
    ROOT / "docs" / "how-to" / "static-embeddings.md",
)


def quiet_run(path: Path) -> Run:
    """A stored run, unless its machine was not quiet, which runs before 2026-11-25 do not say."""
    run: Run = json.loads(path.read_text())
    if run.get("disturbed"):
        raise SystemExit(
            f"{path.name}: measure again, the machine was not quiet: {'; '.join(run['disturbed'])}"
        )
    return run


def newest_run() -> Run:
    """The latest stored run of the benchmarks, by the date in its name."""
    return quiet_run(max(RESULTS.glob("*-????-??-??.json"), key=lambda path: path.stem[-10:]))


def stored(name: str) -> Run:
    """The run of benchmarks/bench_NAME.py, which is stored on its own."""
    return quiet_run(RESULTS / f"{name.replace('_', '-')}.json")


def stored_logistic() -> Run:
    return stored("logistic")


# What a page shows between its marks, but for the tables of a run of `make bench`.
SECTIONS: dict[str, Callable[[], str]] = {
    **{f"papers {name}": section for name, section in (pages.SECTIONS | claims.SECTIONS).items()},
    "amd": amd.stored_table,
    "small nvidia": small_nvidia.stored_table,
    "losses on a GPU": losses_on_gpu.stored_table,
    "conventions": lambda: conventions_table(stored_peers()["found"]),
    "conventions machine": lambda: conventions_machine(stored_peers()),
    "peers": lambda: peers.speed_table(peers.stored()["found"]),
    "peers errors": lambda: peers.error_table(peers.stored()["errors"]),
    "peers machine": lambda: peers.machine_line(peers.stored()),
    "peers trainer": lambda: peers_trainer.speed_table(peers_trainer.stored()["speed"]["found"]),
    "peers curves": lambda: peers_trainer.equality_line(peers_trainer.stored_curves()),
    "peers whole batch": lambda: peers_whole_batch.speed_table(peers_whole_batch.stored()["found"]),
    "peers whole batch errors": lambda: peers_whole_batch.error_table(peers_whole_batch.stored()["errors"]),
    "peers whole batch machine": lambda: peers.machine_line(peers_whole_batch.stored()),
    "largest": lambda: headline.largest_sentence(stored("headline")),
    "batch": lambda: headline.batches_table(stored("headline")["batches"]),
    "headline intel": lambda: headline.times_sentence(stored("headline-intel")),
    "headline machine": lambda: machine(stored("headline")),
    "static trainer": lambda: static_trainer.times_table(static_trainer.stored()),
    "static trainer memory": lambda: static_trainer.memory_table(static_trainer.stored()),
    "static trainer machine": lambda: static_trainer.machine_line(static_trainer.stored()),
    "counters peers": lambda: counters_table.of_peers(counters_table.stored_peers()),
    "counters machine": lambda: counters_table.machine_of_peers(counters_table.stored_peers()),
    "exactness": lambda: exactness.errors_table(exactness.stored()),
    "exactness machine": lambda: exactness.machine_line(exactness.stored()),
    "bfloat16 intel": lambda: bfloat16_table(stored("bfloat16-intel")),
    "products intel": lambda: products_table(stored("bfloat16-intel")),
    "machine intel": lambda: machine(stored("bfloat16-intel")),
    "torch engine": lambda: torch_engine_table(stored("torch_engine")),
    "torch engine machine": lambda: machine(stored("torch_engine")),
    "matryoshka": lambda: matryoshka_table(stored("matryoshka")),
    "matryoshka machine": lambda: machine(stored("matryoshka")),
    "margin": lambda: margin_table(stored("margin")),
    "margin machine": lambda: machine(stored("margin")),
    "peak": lambda: peak_table(stored("peak")),
    "peak machine": lambda: machine(stored("peak")),
    "logistic": lambda: logistic_table(stored_logistic()),
    "logistic machine": lambda: machine(stored_logistic()),
    "splade": lambda: splade_table(stored("splade")),
    "splade machine": lambda: machine(stored("splade")),
    "distributed": lambda: distributed_table(stored("distributed")),
    "distributed machine": lambda: machine(stored("distributed")),
    "predictions": predict.predictions_table,
    "scaling thresholds": predict.thresholds_table,
    "allocator": lambda: allocator.allocator_table(allocator.stored()["found"]),
    "allocator machine": lambda: machine(allocator.stored()),
    "precision": lambda: precision.curves_table(precision.stored()["curves"]["found"]),
    "precision speeds": lambda: precision.speeds_table(precision.stored()["speeds"]["found"]),
    "precision machine": lambda: machine(precision.stored()["speeds"]),
    "quantization": lambda: quantization.ndcg_table(quantization.stored()["found"]),
    "quantization machine": lambda: machine(quantization.stored()),
    "quantization sizes": lambda: quantization.sizes_sentence(quantization.stored()["found"]),
    "bow": lambda: learning_table("quickthoughts-bow"),
    "gru training": lambda: learning_table("quickthoughts-gru"),
    "evaluation": evaluation_table,
    "seeds": seeds_table,
    "retrieval": retrieval_table,
    "retrieval error": retrieval_sentence,
    "gloss": gloss_table,
    "gloss inference": gloss_inference_table,
    "interpolation": lambda: stored_text("gloss-interpolation.txt"),
    "neighbours": lambda: neighbours_text("quickthoughts-bow"),
    "gallery nearest": lambda: stored_text("gallery/nearest-sentences.txt"),
    "gallery clip": lambda: stored_text("gallery/clip.txt"),
    "gallery search": lambda: stored_text("gallery/search.txt"),
}


def sections(run: Run) -> dict[str, Callable[[], str]]:
    """What a page shows between each of its marks: a run that is stored by itself stands before `run`."""
    of_run = {name: partial(table_of, run) for name, (table_of, _) in TABLES.items()}
    return {"machine": lambda: machine(run), **of_run, **SECTIONS}


def rendered(text: str) -> str:
    """A page in which the text between each pair of markers is rendered anew."""
    known = sections(newest_run())

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- results: {name} -->\n{known[name]()}\n<!-- end -->"

    return re.sub(r"<!-- results: (?P<name>[\w ]+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def plot(run: Run, path: Path) -> None:
    """Time and peak memory over N at D=768, one above the other, so that a phone shows them too."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fastqt"
    from matplotlib import pyplot

    rows = sorted(
        (r for r in rows_of(run, "test_loss") if r["D"] == 768 and r["memory"] == "fast"),
        key=lambda r: r["N"],
    )
    figure, (time, memory) = pyplot.subplots(2, 1, figsize=(4.6, 6.8), layout="constrained")
    N = [r["N"] for r in rows]
    time.loglog(N, [r["seconds"] for r in rows], "o-", label="fastqt")
    time.loglog(N, [r["eager_seconds"] for r in rows], "s-", label=headline.PLAIN)
    time.loglog(N, [r["gemm_seconds"] for r in rows], "k:", label="its three GEMMs")
    time.set(xlabel="N", ylabel="seconds, forward and backward", title="time")
    for key, style, label in (
        ("peak_above_gradients", "o-", "fastqt"),
        ("eager_peak_above_gradients", "s-", headline.PLAIN),
    ):
        memory.loglog(N, [max(r[key], 4096) / MIB for r in rows], style, label=label)
    memory.set(xlabel="N", ylabel="MiB above inputs and gradients", title="memory")
    for axes in (time, memory):
        axes.set_xticks(N, [f"{n:,}" for n in N])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, metadata={"Date": None})


def memory_plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The memory of the loss alone, in a picture that a phone shows too: two lines, with their names."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fastqt"
    from matplotlib import pyplot

    N = [r["rows"] for r in rows]
    figure, axes = pyplot.subplots(figsize=(4.6, 3.4), layout="constrained")
    # The name stands above the middle of one line and below that of the other, the last figure at the end.
    for name, colour, above in ((headline.PLAIN, "#d1662b", True), (headline.OURS, "#1f6feb", False)):
        peaks = [max(r["peaks"][name], MIB) / MIB for r in rows]
        axes.loglog(N, peaks, "o-", color=colour, linewidth=2.5)
        text = {"textcoords": "offset points", "fontsize": 13, "color": colour}
        middle = len(N) // 2
        axes.annotate(
            name,
            (N[middle], peaks[middle]),
            xytext=(-10, 12) if above else (0, -22),
            ha="right" if above else "center",
            **text,
        )
        axes.annotate(f"{peaks[-1]:,.0f}", (N[-1], peaks[-1]), xytext=(0, 9), ha="center", **text)

    axes.set_ylim(0.6, 4 * max(r["peaks"][headline.PLAIN] for r in rows) / MIB)
    axes.set_xticks(N[::2], [f"{n:,}" for n in N[::2]], fontsize=12)
    axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"], fontsize=12)
    axes.minorticks_off()
    axes.set_xlabel("rows of the batch", fontsize=13)
    axes.set_title("memory of the loss, MiB", fontsize=13, loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    for page in PAGES:
        page.write_text(rendered(page.read_text()))
    plot(newest_run(), RESULTS / "loss.svg")
    memory_plot(stored("headline")["batches"], RESULTS / "memory.svg")
    curves.draw()
    print(f"rendered {', '.join(page.name for page in PAGES)} loss.svg and memory.svg", file=sys.stderr)


if __name__ == "__main__":
    main()
