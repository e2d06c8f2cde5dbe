"""The tables that documents show of a run of the benchmarks, which `pytest --benchmark` prints at its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.measure.tables import table

MIB = 2**20

Run = dict[str, Any]


def rows_of(run: Run, test: str) -> list[dict[str, Any]]:
    """What each benchmark of a test recorded, with its median time as `seconds`."""
    of_test = [b for b in run["benchmarks"] if b["name"].split("[")[0] == test]
    return [{**b["extra_info"], "seconds": b["stats"]["median"]} for b in of_test]


def milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:,.1f}"


def mebibytes(size: float | None) -> str:
    return "–" if size is None else f"{max(size, 0) / MIB:,.0f}"


def times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f} ×"


def machine(run: Run) -> str:
    m = run["machine_info"]
    threads = "1 thread" if m["threads"] == 1 else f"{m['threads']} threads"
    return (
        f"{m['cpu']}, {threads}, {m['system']}, Python {m['python_version']}, "
        f"torch {m['torch_version']}, {run['datetime'][:10]}"
    )


LOSS_HEADER = ("fastqt ms", "× GEMMs", "plain PyTorch × GEMMs", "fastqt MiB", "plain PyTorch MiB")


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


def torch_engine_table(run: Run) -> str:
    return table(
        ("N", "D", *LOSS_HEADER),
        ((f"{r['N']:,}", f"{r['D']:,}", *loss_figures(r)) for r in rows_of(run, "test_torch_engine")),
    )


def peak_table(run: Run) -> str:
    """Shares of the peak of the multipliers, each of the same operations."""

    def share(of: float | None) -> str:
        return "–" if of is None else f"{of:.0%}"

    def row(r: dict[str, Any]) -> tuple[str, ...]:
        return (
            r["dtype"],
            *(f"{r[size]:,}" for size in ("N", "D")),
            milliseconds(r["step_seconds"]),
            *(share(r["shares"].get(name)) for name in ("fastqt", "own", "torch", "eager")),
            times(r["times_faster_than_eager"]),
            share(r["share_after_others"]),
            times(r["times_faster_after_others"]),
        )

    shares = "fastqt", "its products", "torch's products", "plain PyTorch"
    header = ("dtype", "N", "D", "fastqt ms", *shares, "faster", "after others", "faster")
    return table(header, map(row, sorted(rows_of(run, "test_peak"), key=lambda r: r["dtype"], reverse=True)))


def matryoshka_table(run: Run) -> str:
    """Five prefixes in one loss, beside the one loss, a loss of each of ours, and of plain PyTorch."""
    names = {"prefixes": "seconds", **{name: f"{name}_seconds" for name in ("one", "wrapper", "eager")}}

    def row(r: dict[str, Any]) -> tuple[str, ...]:
        times_of = [milliseconds(r[key]) for key in names.values()]
        peaks = [mebibytes(r["peaks_above_gradients"][name]) for name in names]
        return (f"{r['N']:,}", f"{r['D']:,}", *times_of, *peaks)

    labels = ["plain PyTorch" if name == "eager" else name for name in names]
    header = ("N", "D", *(f"{label} {unit}" for unit in ("ms", "MiB") for label in labels))
    return table(header, map(row, rows_of(run, "test_matryoshka")))


def margin_table(run: Run) -> str:
    """InfoNCE with a margin for false negatives, and with a guide, as multiples of the loss without."""
    rows = (r for r in rows_of(run, "test_false_negatives") if r["backend"] == "cpu")
    return table(
        ("N", "D", "fastqt ms", "with the margin", "with a guide", "margin MiB", "guide MiB"),
        (
            (
                f"{r['N']:,}",
                f"{r['D']:,}",
                milliseconds(r["seconds"]),
                *(times(r["ratio_to_without"][name]) for name in ("margin", "guide")),
                *(mebibytes(r["peak_above_gradients"][name]) for name in ("ours", "guide")),
            )
            for r in rows
        ),
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
    ratios = "× GEMMs", "plain PyTorch × GEMMs", "fastqt in float32 × GEMMs"

    return table(
        ("loss", "memory", "N", "D", "fastqt ms", *ratios),
        (
            (
                f"`{r['loss']}`",
                r["memory"],
                f"{r['N']:,}",
                f"{r['D']:,}",
                milliseconds(r["seconds"]),
                *(times(r[f"{of}ratio_to_gemm"]) for of in ("", "eager_", "float32_")),
            )
            for r in rows_of(run, "test_bfloat16")
        ),
    )


def bfloat16_error_table(run: Run) -> str:
    return table(
        ("embeddings", "N", "D", "fastqt", "plain PyTorch"),
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
    """Without its last column for runs that have not measured it."""
    rows = [r for r in rows_of(run, "test_gru_forward_and_backward") if r["torch_seconds"] is not None]
    with_bfloat16 = all("bfloat16_speedup" in r for r in rows)
    header = ("GRU", "fastqt ms", "× GEMMs", "torch.nn.GRU × GEMMs", "faster", "bfloat16 : float32")
    return table(
        header if with_bfloat16 else header[:-1],
        (
            (
                f"H={r['H']:,}, {'bidirectional' if r['bidirectional'] else 'one direction'}, "
                f"reset {'after' if r['reset_after'] else 'before'}",
                milliseconds(r["seconds"]),
                times(r["ratio_to_gemm"]),
                times(r["torch_ratio_to_gemm"]),
                times(r["speedup_over_torch"]),
                *([times(r["bfloat16_speedup"])] if with_bfloat16 else []),
            )
            for r in rows
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
    (call,) = rows_of(run, "test_call")
    return table(
        ("at N=8, D=8", "µs"),
        ((title, f"{call['microseconds'][name]:.0f}") for name, title in LAYERS.items()),
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
    "test_step_of_all_rows": "gradient, clipping and Adam",
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
    passes = [r["nanoseconds"] for r in rows_of(run, "test_passes")]
    builds = list(passes[0]) if passes else []
    return table(
        ("pass", *builds),
        ((name, *(f"{r[build][name]:.3f}" for build in builds)) for r in passes for name in r["clones"]),
    )


def logistic_table(run: Run) -> str:
    header = ("protocol", "n", "d", "classes", "fits", "solver", "CPU seconds", "fastqt faster", "excess")
    rows = []
    for r in rows_of(run, "test_logistic"):
        fits = r["training_sets"] * len(r["grid"])
        shape = r["protocol"], f"{r['n']:,}", f"{r['d']:,}", f"{r['classes']}", f"{fits:,}"
        rows.append((*shape, "fastqt", f"{r['fastqt_seconds']:,.1f}", "–", f"{r['excess']:.0e}"))
        for name, peer in r["peers"].items():
            figures = f"{peer['seconds']:,.1f}", times(peer["times_faster"]), f"{peer['excess']:.0e}"
            rows.append((*shape, name, *figures))
    return table(header, rows)


def splade_table(run: Run) -> str:
    """SPLADE's pooling, forward and backward, beside plain PyTorch's and the product of the forward pass."""

    def row(r: dict[str, Any]) -> tuple[str, ...]:
        peaks = r["peaks_above_gradients"]
        seconds = (r[name] for name in ("product_seconds", "seconds", "eager_seconds"))
        return (
            *(f"{r[size]:,}" for size in ("B", "L", "V", "D")),
            f"{r['share']:.0%}",
            *(f"{x:.1f}" for x in seconds),
            times(r["eager_seconds"] / r["seconds"]),
            *(mebibytes(peaks[name]) for name in ("ours", "eager")),
        )

    sizes = "B", "L", "V", "D", "words with a weight"
    header = (*sizes, "product s", "fastqt s", "plain PyTorch s", "faster", "fastqt MiB", "plain PyTorch MiB")
    return table(header, map(row, rows_of(run, "test_splade")))


def distributed_table(run: Run) -> str:
    header = ("loss", "ranks", "exchange", "CPU seconds", "× one process", "MiB a rank", "predicted MiB")
    rows = []
    for r in rows_of(run, "test_distributed"):
        name, seconds = f"`{r['loss']}`", r["cpu_seconds_alone"]
        if r["size"] == 2:
            rows.append((name, "1", "–", f"{seconds:.2f}", "–", mebibytes(r["peak_alone"]), "–"))
        for exchange, of_exchange in r["exchanges"].items():
            figures = f"{of_exchange['cpu_seconds']:.2f}", times(of_exchange["ratio_to_one"])
            memory = (mebibytes(of_exchange[key]) for key in ("peak_above_gradients", "predicted_peak"))
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
        "plain PyTorch × GEMMs",
        "fastqt MiB",
        "plain PyTorch MiB",
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


# By the name of a table in the documents: what renders it of a run, and the tests that have made its rows.
TABLES: dict[str, tuple[Callable[[Run], str], tuple[str, ...]]] = {
    "loss": (loss_table, ("test_loss",)),
    "torch engine": (torch_engine_table, ("test_torch_engine",)),
    "matryoshka": (matryoshka_table, ("test_matryoshka",)),
    "margin": (margin_table, ("test_false_negatives",)),
    "peak": (peak_table, ("test_peak",)),
    "family": (family_table, ("test_family",)),
    "bfloat16": (bfloat16_table, ("test_bfloat16",)),
    "bfloat16 error": (bfloat16_error_table, ("test_bfloat16_error",)),
    "products": (products_table, ("test_products",)),
    "gru": (gru_table, ("test_gru_forward_and_backward",)),
    "training step": (training_step_table, ("test_training_step",)),
    "call": (call_table, ("test_call",)),
    "efficiency": (efficiency_table, ("test_quickthoughts_beside_skip_thoughts",)),
    "inference": (inference_table, ("test_inference_step", "test_inference")),
    "tables": (tables_table, tuple(TABLE_STEPS)),
    "passes": (passes_table, ("test_passes",)),
    "logistic": (logistic_table, ("test_logistic",)),
    "splade": (splade_table, ("test_splade",)),
    "distributed": (distributed_table, ("test_distributed",)),
}


def tables_of(run: Run) -> dict[str, str]:
    """The tables of a run by their names in the documents, of those that it has rows for."""
    return {
        name: render(run)
        for name, (render, tests) in TABLES.items()
        if any(rows_of(run, test) for test in tests)
    }
