"""Where lines of a table break: long names after punctuation, options nowhere, figures not before a unit.

So no table is wider than its page, and a figure is read as one.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

CELL = re.compile(r"<td.*?</td>", re.DOTALL)
TEXT = re.compile(r"(?<=>)[^<]+")
WORD = re.compile(r"(?<!\S)--[a-z][\w-]*|\S{16,}")  # options and shorter names stay whole
BREAK = re.compile(r"(?<=\w)([/_.=(,:-]+|&lt;)(?=[A-Za-z_])(?!py\b|md\b|json\b)")

# Between a figure and its unit or its error, where these end the cell.
WITHIN = re.compile(r" (?=(?:×|%|ms|µs|s|h|[KMG]i?B)$)|(?<=\d) (?=± [\d.]+$)|(?<=±) (?=[\d.]+$)")


def add_breaks(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object
) -> None:
    """Adds places where a line may break to the long words of all cells, and takes them from figures."""

    def breakable(word: re.Match[str]) -> str:
        if word[0].startswith("--"):  # else a line may break after each hyphen
            return f'<span class="whole">{word[0]}</span>'
        return BREAK.sub(r"\1<wbr>", word[0])

    def cell(match: re.Match[str]) -> str:
        return TEXT.sub(lambda text: WITHIN.sub("\N{NO-BREAK SPACE}", WORD.sub(breakable, text[0])), match[0])

    if "body" in context:
        context["body"] = CELL.sub(cell, context["body"])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", add_breaks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
