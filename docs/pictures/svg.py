"""Boxes, arrows, words and grids of cells as SVG text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

INK, PALE, LINE = "#1f2328", "#6e7781", "#57606a"
BLUE, ORANGE, GREY, WHITE = "#a5c8f0", "#f6c99a", "#eaeef2", "#ffffff"


def document(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A picture on white ground, which dark pages do not change."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="13" role="img">'
    )
    marker = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker></defs>'
    )
    ground = f'<rect width="{width}" height="{height}" rx="6" fill="{WHITE}"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", marker, ground, *parts, "</svg>"]) + "\n"


def box(x: float, y: float, w: float, h: float, fill: str = GREY, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}" stroke="{LINE}"{dash}/>'


def words(
    x: float,
    y: float,
    *lines: str,
    anchor: str = "middle",
    colour: str = INK,
    bold: bool = False,
    size: int = 13,
) -> str:
    """Lines of text; (x, y) is on the baseline of the first one."""
    weight = ' font-weight="600"' if bold else ""
    return "\n".join(
        f'<text x="{x}" y="{y + 17 * n}" text-anchor="{anchor}" fill="{colour}" font-size="{size}"{weight}>'
        f"{escape(line)}</text>"
        for n, line in enumerate(lines)
    )


def labelled(x: float, y: float, w: float, h: float, *lines: str, fill: str = GREY) -> str:
    """A box with its text in the middle."""
    first = y + h / 2 + 5 - 17 * (len(lines) - 1) / 2
    return box(x, y, w, h, fill) + "\n" + words(x + w / 2, first, *lines)


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1} {y1}L{x2} {y2}" stroke="{LINE}" stroke-width="1.5" marker-end="url(#tip)"/>'


def grid(x: float, y: float, cell: float, weights: Sequence[Sequence[float]], marks: dict[int, str]) -> str:
    """Cells whose blue says how large their weight is; `marks` are texts of diagonal cells by their row."""
    parts = []
    for i, row in enumerate(weights):
        for j, weight in enumerate(row):
            opacity = f"{min(1.0, 0.12 + 0.88 * weight):.2f}" if weight else "0"
            at = f'x="{x + j * cell:g}" y="{y + i * cell:g}" width="{cell:g}" height="{cell:g}"'
            parts.append(f'<rect {at} fill="#1f6feb" fill-opacity="{opacity}" stroke="#afb8c1"/>')
            if i == j and i in marks:
                middle = x + (j + 0.5) * cell, y + (i + 0.5) * cell + 4
                parts.append(words(*middle, marks[i], size=11))
    return "\n".join(parts)
