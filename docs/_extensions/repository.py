"""Links of Markdown pages, which GitHub shows as well: what becomes of them on the site.

A link to another page of docs/ stays as it is: MyST leads it to the page and its heading. A link to a
Markdown file that the site has a page for leads to that page. A link to another file of the repository leads
to a copy of it, and of a link to a folder, which the site has nothing of, the text is left. A link to a name
of the reference, such as `[loss](api/losses.rst#fastqt.info_nce_loss)`, leads to that name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

LINK = re.compile(
    r"(?<!!)\[(?P<text>[^\]]+)\]\((?!\w+:)(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)"
    r"|^[ ]*(?P<fence>```+|:::+).*?^[ ]*(?P=fence)[ ]*$",
    re.DOTALL | re.MULTILINE,
)


def link_to_site(app: Sphinx, docname: str, source: list[str]) -> None:
    """Makes the links of a Markdown page to files lead to what the site has of them."""
    page = Path(app.env.doc2path(docname))
    docs = Path(app.srcdir).resolve()

    def site_link(match: re.Match[str]) -> str:
        if match["fence"]:
            return match[0]
        target = (page.parent / match["target"]).resolve()
        anchor = match["anchor"] or ""

        if target.suffix == ".rst" and anchor:
            return f"{{py:obj}}`{match['text'].strip('`')} <{anchor[1:]}>`"
        if target.is_relative_to(docs):
            return match[0]
        if target.is_dir():
            return match["text"]
        if inside := app.config.site_pages.get(target.relative_to(docs.parent).as_posix()):
            way = os.path.relpath(docs / inside, page.parent)
            return f"[{match['text']}]({Path(way).as_posix()}{anchor})"
        return f"[{match['text']}](<path:{match['target']}>)"  # MyST copies it

    if page.suffix == ".md":
        source[0] = LINK.sub(site_link, source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("site_pages", {}, "env", dict)
    app.connect("source-read", link_to_site)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
