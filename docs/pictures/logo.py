"""The logo: a matrix of scores that is not there, and the one row of cells that is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

CELL, GAP, COUNT, ROW = 14, 3, 4, 1
STEP = CELL + GAP


def logo(ink: str, accent: str) -> str:
    """A mark without a ground, for light or for dark pages."""
    side = COUNT * STEP - GAP + 4
    parts = []
    for i in range(COUNT):
        for j in range(COUNT):
            at = f'x="{2 + j * STEP}" y="{2 + i * STEP}" width="{CELL}" height="{CELL}" rx="2.5"'
            if i == j:
                parts.append(f'<rect {at} fill="{accent}"/>')
            elif i == ROW:
                parts.append(f'<rect {at} fill="{ink}"/>')
            else:
                line = f'stroke="{ink}" stroke-opacity="0.55" stroke-dasharray="2.4 2"'
                parts.append(f'<rect {at} fill="none" {line}/>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side} {side}" width="{side}" height="{side}">'
    )
    return "\n".join([head, "<title>fastqt</title>", *parts, "</svg>"]) + "\n"


LOGOS: dict[str, Callable[[], str]] = {
    "logo-light": partial(logo, "#1f2328", "#1f6feb"),
    "logo-dark": partial(logo, "#e6edf3", "#58a6ff"),
}
