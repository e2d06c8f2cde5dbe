"""Links of pages to files outside of docs/ lead to copies on the site; folders are named without a link."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>\.\./[^)#\s]+)(?:#[^)\s]*)?\)")


def link_to_copies(app: Sphinx, docname: str, source: list[str]) -> None:
    """Makes the links of a Markdown page to the repository lead to copies of its files."""
    page = Path(app.env.doc2path(docname))

    def text_or_link(match: re.Match[str]) -> str:
        if (page.parent / match["target"]).is_dir():
            return match["text"]
        return f"[{match['text']}](<path:{match['target']}>)"  # MyST copies it, a Markdown file included

    if page.suffix == ".md":
        source[0] = LINK.sub(text_or_link, source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", link_to_copies)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
