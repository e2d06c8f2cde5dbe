"""Small pictures of what the losses compare, and with which targets; `draw.py` writes them.

The picture of a loss has a grid for each block of candidates. A cell has the more blue the larger its target
is, and a cell that is crossed out is in no softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from svg import PALE, arrow, document, grid, words
from torch import Tensor

CELL, ROWS, TOP = 20, 6, 52
Cells = Collection[tuple[int, int]]


def block(x: float, name: str, targets: Tensor, out: Cells = ()) -> str:
    """A grid of targets under its name, in which some cells are crossed out."""
    rows, columns = targets.shape
    parts = [words(x + CELL * columns / 2, TOP - 12, name), grid(x, TOP, CELL, targets.tolist(), {})]
    parts += [
        words(x + CELL * (j + 0.5), TOP + CELL * i + 15, "×", colour=PALE, size=15) for i, j in sorted(out)
    ]
    assert all(i < rows and j < columns for i, j in out)
    return "\n".join(parts)


def side(name: str, rows: int = ROWS) -> str:
    """The name of the rows, which are read from below."""
    x, y = 18, TOP + CELL * rows / 2
    return words(x, y, name).replace("<text", f'<text transform="rotate(-90 {x} {y:g})"')


def picture(title: str, *parts: str, width: int, rows: int = ROWS, below: str = "") -> str:
    y = TOP + CELL * rows
    text = [words(width / 2, y + 24, below, colour=PALE)] if below else []
    return document(width, y + (38 if below else 16), title, [*parts, *text])


def pairs() -> str:
    targets, none = torch.eye(ROWS), torch.zeros(ROWS, 4)
    return picture(
        "InfoNCE",
        side("queries"),
        block(40, "candidates", targets),
        block(40 + CELL * ROWS + 24, "negatives", none),
        width=320,
        below="one softmax for each row",
    )


def clip() -> str:
    x, end = 40, TOP + CELL * ROWS
    return picture(
        "CLIP",
        side("images"),
        block(x, "texts", torch.eye(ROWS)),
        arrow(x, end + 10, x + CELL * ROWS, end + 10),
        arrow(x + CELL * ROWS + 10, TOP, x + CELL * ROWS + 10, end),
        words(
            x + CELL * ROWS + 22,
            TOP + 36,
            "a softmax",
            "of each row,",
            "and one of",
            "each column",
            anchor="start",
        ),
        width=290,
        below=" ",
    )


def two_views() -> str:
    views = 4
    targets = torch.eye(2 * views).roll(views, 1)
    return picture(
        "SimCLR",
        side("both views", 2 * views),
        block(40, "both views", targets, [(i, i) for i in range(2 * views)]),
        width=240,
        rows=2 * views,
        below="a view is not compared with itself",
    )


def decoupled() -> str:
    views, n = 4, 8
    out = [(i, i) for i in range(n)] + [(i, (i + views) % n) for i in range(n)]
    return picture(
        "DCL",
        side("both views", n),
        block(40, "both views", torch.zeros(n, n), out),
        width=240,
        rows=n,
        below="the positives are subtracted apart",
    )


def labels() -> str:
    ids = torch.tensor([3, 3, 3, 7, 7, 7, 1, 1])
    same = (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)
    return picture(
        "SupCon",
        side("rows of labels 3 3 3 7 7 7 1 1", len(ids)),
        block(40, "the same rows", same / same.sum(1, keepdim=True), [(i, i) for i in range(len(ids))]),
        width=240,
        rows=len(ids),
        below="equal shares of the same label",
    )


def classes() -> str:
    targets = torch.nn.functional.one_hot(torch.tensor([4, 0, 4, 9, 2, 7]), 11)
    return picture(
        "Cross-entropy over classes",
        side("rows"),
        block(40, "classes", targets),
        width=300,
        below="the class of each row",
    )


def gist() -> str:
    """The crossed cells are an example of what a guide may find, and each row with itself."""
    itself, none = [(i, i) for i in range(ROWS)], torch.zeros(ROWS, ROWS)
    too_similar = [(1, 4), (4, 1)]
    step = CELL * ROWS + 24
    return picture(
        "GISTEmbed",
        side("pairs"),
        block(40, "anchor with positives", torch.eye(ROWS), [(1, 4)]),
        block(40 + step, "anchor with anchors", none, itself + too_similar),
        block(40 + 2 * step, "positive with positives", none, [*itself, (4, 1)]),
        width=490,
        below="one softmax for each row; crossed: what the guide finds too similar",
    )


def mixcse() -> str:
    """The slides' form with a column of mixtures, and the released one with two blocks of them."""
    n, x, gap = 4, 236, CELL * 4 + 14
    none = torch.zeros(n, n)
    masked = [(i, (i - 1) % n) for i in range(n)], [(i, (i + 1) % n) for i in range(n)]
    return picture(
        "MixCSE",
        side("views z1", n),
        words(100, 20, "slides", bold=True),
        block(40, "z2", torch.eye(n)),
        block(40 + gap, "mᵢ", torch.zeros(n, 1)),
        words(x + 1.5 * gap, 20, "released", bold=True),
        block(x, "z2", torch.eye(n)),
        block(x + gap, "m", none, masked[0]),
        block(x + 2 * gap, "a with z2", none, masked[1]),
        width=540,
        rows=n,
        below="m, a: mixtures; crossed: the sentence itself is the partner",
    )


LOSSES: dict[str, Callable[[], str]] = {
    "loss-pairs": pairs,
    "loss-clip": clip,
    "loss-two-views": two_views,
    "loss-decoupled": decoupled,
    "loss-labels": labels,
    "loss-classes": classes,
    "loss-gist": gist,
    "loss-mixcse": mixcse,
}
