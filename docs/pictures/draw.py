"""Draws the pictures of the pages: python docs/pictures/draw.py

The cells of target matrices are those of fastqt's own operators.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from logo import LOGOS
from loss_targets import LOSSES
from svg import BLUE, GREY, ORANGE, PALE, WHITE, arrow, box, document, grid, labelled, words

from fastqt import Diagonal, Window, smoothed
from fastqt.targets import TargetsLike, as_targets

HERE = Path(__file__).parent


def matrix(targets: TargetsLike, N: int) -> list[list[float]]:
    """The target matrix of an operator for N queries and N candidates."""
    rows = as_targets(targets).rows(N, N, torch.device("cpu"))
    starts, columns, weights = rows.compressed()
    T = torch.zeros(N, N, dtype=torch.float64)
    T += 0 if rows.background is None else rows.background[:, None]
    for i in range(N):
        for n in range(int(starts[i]), int(starts[i + 1])):
            T[i, columns[n]] += weights[n]
    return T.tolist()


def targets() -> str:
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    labels = torch.tensor([2, 0, 2, 5, 5, -100, 1, 7])
    shown = {
        "Window(1)": Window(1),
        "Window(offsets=[1])": Window(offsets=[1]),
        "Window(1, document_ids=ids)": Window(1, document_ids=ids),
        "Diagonal()": Diagonal(),
        "class indices": labels,
        "smoothed(Diagonal(), 0.1)": smoothed(Diagonal(), 0.1),
    }
    parts = [words(310, 22, "rows: queries, columns: candidates; more blue: larger targets", colour=PALE)]
    for n, (name, operator) in enumerate(shown.items()):
        x, y = 30 + 200 * (n % 3), 60 + 210 * (n // 3)
        parts += [words(x + 80, y - 10, name), grid(x, y, 20, matrix(operator, 8), {})]
    return document(620, 450, "Target matrices of six operators", parts)


def diagonals() -> str:
    parts = []
    texts = {"zero": "0", "exclude": "−∞", "keep": "s"}
    below = {
        "zero": ("exp(0) = 1 stays", "in the denominator"),
        "exclude": ("the cell leaves", "the softmax"),
        "keep": ("a candidate like", "all others"),
    }
    for n, (name, text) in enumerate(texts.items()):
        x = 40 + 195 * n
        cells = matrix(Window(1), 6)
        parts += [
            words(x + 75, 25, f'diagonal="{name}"', bold=True),
            grid(x, 40, 25, cells, dict.fromkeys(range(6), text)),
            words(x + 75, 210, *below[name], colour=PALE),
        ]
    return document(620, 240, "The score of a sentence with itself", parts)


def cpu_walk() -> str:
    top, height, chunk, tall = 100, 200, 150, 50
    return document(
        640,
        400,
        "The walk of the CPU engine over chunks of rows",
        [
            labelled(190, 20, 240, 44, "G: candidates (M × D)"),
            box(40, top, 90, height),
            labelled(40, chunk, 90, tall, "rows of F", fill=BLUE),
            words(85, top + height - 12, "F (N × D)", colour=PALE),
            box(190, top, 240, height, WHITE, dashed=True),
            labelled(
                190,
                chunk,
                240,
                tall,
                "1: S = s F Gᵀ",
                "2: S becomes dS (C++ row pass)",
                fill=ORANGE,
            ),
            words(310, top + height - 32, "dashed: N × M cells,", "never in memory together", colour=PALE),
            box(490, top, 110, height),
            labelled(490, chunk, 110, tall, "3: dF = s dS G", "(product)", fill=BLUE),
            words(545, top + height - 12, "dF (N × D)", colour=PALE),
            labelled(190, 340, 240, 44, "4: dG += s dSᵀ F (product)", fill=BLUE),
            arrow(130, chunk + 25, 186, chunk + 25),
            arrow(310, 64, 310, chunk - 4),
            arrow(430, chunk + 25, 486, chunk + 25),
            arrow(215, chunk + tall, 215, 336),
        ],
    )


def triton_walk() -> str:
    steps = [
        (
            "row_shifts",
            "scores of the exact cells and of a sample: a shift for each row",
            BLUE,
            "Triton, once",
        ),
        ("exp_scores", "tiles of F Gᵀ; epilogue: E = exp(S − shift), sums of its rows", ORANGE, "Triton"),
        (
            "row_stats",
            "repairs rows whose shift was too far off; logsumexp, loss, factors",
            BLUE,
            "Triton",
        ),
        ("A = E G", "", GREY, "cuBLAS"),
        ("query_gradient_epilogue", "dF = factors × A + exact cells; writes W = factors × F", BLUE, "Triton"),
        ("B += Eᵀ W", "", GREY, "cuBLAS"),
        ("candidate_gradient_epilogue", "dG = B + exact cells", BLUE, "Triton, once"),
    ]
    parts, y = [], 12
    for n, (name, what, fill, by) in enumerate(steps):
        height = 44 if what else 28
        parts += [
            labelled(52, y, 440, height, *filter(None, (name, what)), fill=fill),
            words(506, y + height / 2 + 5, by, anchor="start", colour=PALE),
        ]
        if n == 1:
            first = y
        if n == 6:
            bracket = f"M44 {first}H34V{y + height}H44"
            parts.append(f'<path d="{bracket}" fill="none" stroke="{PALE}" stroke-width="1.5"/>')
            middle = (first + y + height) / 2
            turned = f'transform="rotate(-90 22 {middle})"'
            parts.append(
                words(22, middle, "for each chunk of rows", colour=PALE).replace("<text", f"<text {turned}")
            )
        y += height + 14
        if n < len(steps) - 1:
            parts.append(arrow(272, y - 14, 272, y - 2))
    return document(640, y, "The walk of the Triton engine", parts)


def one_launch() -> str:
    parts = [words(20, 24, "one launch; all thread blocks run at the same time", anchor="start", colour=PALE)]
    phases = [
        ("products", ["tile of F Gᵀ"] * 4, "a tile of scores each, D in parts", ORANGE),
        ("rows", ["rows of S"] * 4, "a warp a row: softmax, loss, dS", BLUE),
        (
            "gradients",
            ["tile of dF", "tile of dF", "tile of dG", "tile of dG"],
            "dF = s dS G and dG = s dSᵀ F",
            GREY,
        ),
    ]
    for n, (name, works, what, fill) in enumerate(phases):
        y = 42 + 104 * n
        parts.append(words(20, y + 20, name, anchor="start", bold=True))
        parts.append(words(620, y + 62, what, anchor="end", colour=PALE))
        for k, work in enumerate(works):
            parts.append(labelled(120 + 125 * k, y, 115, 42, work, fill=fill))
        if n < 2:
            parts.append(box(120, y + 74, 490, 12, PALE))
            parts.append(words(20, y + 85, "barrier", anchor="start", colour=PALE))
    return document(640, 330, "The kernel that computes a small batch in one launch", parts)


PICTURES: dict[str, Callable[[], str]] = {
    "targets": targets,
    "diagonals": diagonals,
    "cpu-walk": cpu_walk,
    "triton-walk": triton_walk,
    "one-launch": one_launch,
    **LOSSES,
    **LOGOS,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
