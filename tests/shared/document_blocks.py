"""The code blocks of a page of the documentation, and its sections."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Attributes:
        section: the heading above it, "" if there is none.
        language: what is written after the fence.
        code: its lines.
    """

    section: str
    language: str
    code: str


def blocks(page: str) -> list[Block]:
    """The blocks of docs/`page`, in their order."""
    found, section = [], ""
    text = (DOCS / page).read_text()
    for heading, language, code in re.findall(r"^#+ ([^\n]+)$|^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.M):
        if heading:
            section = heading
        else:
            found.append(Block(section, language, code))
    return found


def headings(path: Path) -> set[str]:
    """The names by which links reach the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.M)
    found = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
