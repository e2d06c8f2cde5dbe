"""The site is built without a warning, loads nothing from elsewhere, and all of its links lead somewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("sphinx", reason="the extra docs is not installed")
from snowballstemmer import stemmer
from sphinx.search.en import SearchEnglish

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# An element that the browser loads by itself, and the attribute that says from where.
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data", "embed": "src"}
LOADED_LINKS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "modulepreload", "manifest"}

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.styles = ""
        self.in_style = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.in_style = tag == "style"
        self.styles += given.get("style") or ""
        self.anchors.update(value for name in ("id", "name") if (value := given.get(name)))
        if tag == "link" and LOADED_LINKS & set((given.get("rel") or "").split()):
            self.loads.append(given["href"])
        elif tag in LOADED and given.get(LOADED[tag]):
            self.loads.append(given[LOADED[tag]])
        elif tag == "a" and given.get("href"):
            self.links.append(given["href"])

    def handle_data(self, data):
        if self.in_style:
            self.styles += data


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The site as `make docs` builds it: the same options, other folders."""
    folder = tmp_path_factory.mktemp("site")
    (line,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if "-m sphinx" in line)
    options = line.split("-m sphinx ")[1].split(" -d ")[0].split()
    assert {"-W", "-n"} <= set(options)
    command = [sys.executable, "-m", "sphinx", *options, "-d", folder / "doctrees", DOCS, folder / "html"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def pages(built) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in sorted(built.rglob("*.html"))}


def test_every_page_is_in_the_navigation(built, pages):
    front = pages[built / "index.html"]
    reached = {(built / urlsplit(link).path).resolve() for link in front.links if not urlsplit(link).scheme}
    for source in [*DOCS.rglob("*.md"), *DOCS.rglob("*.rst")]:
        if source.stem != "index":
            assert (built / source.relative_to(DOCS).with_suffix(".html")) in reached, source


def test_nothing_is_loaded_from_elsewhere(built, pages):
    for path, page in pages.items():
        for target in page.loads:
            parts = urlsplit(target)
            assert parts.scheme in ("", "data"), f"{path.name} loads {target}"
            assert not parts.netloc, f"{path.name} loads {target}"
            assert not parts.path or (path.parent / unquote(parts.path)).exists(), target
        assert "http" not in page.styles
    for style in built.rglob("*.css"):
        for use in ("url(http", "url('http", 'url("http', "url(//", "@import"):
            assert use not in style.read_text(), style.name


def test_links_lead_to_pages_and_anchors(pages):
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path.name}: {link}"
            assert target.suffix not in (".md", ".rst"), f"{path.name} links to the source of a page: {link}"
            if parts.fragment and target in pages:
                known = pages[target].anchors
                assert unquote(parts.fragment) in known, f"{path.name}: {link} has no such anchor"


def test_pages_that_are_notebooks_have_them_and_show_what_they_print(built, pages):
    """Each notebook was run to its end, without an error, and the page shows what its cells have printed."""
    (line,) = re.findall(r"^notebook_pages = .*", (DOCS / "conf.py").read_text(), re.MULTILINE)
    names = re.findall(r'"([^"]+)"', line)
    assert len(names) >= 3
    for name in names:
        page = built / f"{name}.html"
        (link,) = {link for link in pages[page].links if link.endswith(".ipynb")}
        notebook = json.loads((page.parent / unquote(link)).read_text())
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))

        outputs = [output for cell in cells for output in cell["outputs"]]
        assert {output["output_type"] for output in outputs} <= {"stream", "execute_result"}
        printed = ["".join(each["text"]) for each in outputs if each.get("name") == "stdout"]
        assert printed
        assert page.read_text().count('<div class="output highlight-text') == sum(
            any(output.get("name") != "stderr" for output in cell["outputs"]) for cell in cells
        )


# The page that a search shows first.
FIRST = {
    "hard negatives": "how-to/retriever",
    "false negatives": "losses/general",
    "resume": "how-to/train",
    "learning rate": "how-to/train",
    "evaluate": "how-to/evaluate",
    "export": "how-to/export",
}
# Runs the site's own program of the search for some words, and prints the page that it shows first.
PROGRAM = """
const fs = require("fs"), vm = require("vm");
const [site, ...queries] = process.argv.slice(1);
const context = {
  _: text => text,
  document: { getElementById: () => null, addEventListener() {} },
  DOCUMENTATION_OPTIONS: {}, SPHINX_HIGHLIGHT_ENABLED: false, _ready() {},
};
context.window = context;
vm.createContext(context);
for (const name of ["_static/searchtools.js", "_static/language_data.js", "searchindex.js"])
  vm.runInContext(fs.readFileSync(`${site}/${name}`, "utf8"), context);
for (const query of queries) {
  context.query = query;
  const found = vm.runInContext("Search._performSearch(...Search._parseQuery(query))", context);
  console.log(found.reverse()[0][0]);
}
"""


def test_a_search_shows_the_page_first_on_which_users_act(built):
    if shutil.which("node") is None:
        pytest.skip("wants node, to run the program of the search")
    command = ["node", "-e", PROGRAM, str(built), *FIRST]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert dict(zip(FIRST, done.stdout.splitlines(), strict=True)) == FIRST


# What users look for, and the page that a search has to find.
SEARCHES = {
    "SimCLR": "losses/views",
    "MNRL": "losses/pairs",
    "temperature": "concepts",
    "logQ correction": "losses/general",
    "hard negatives": "losses/general",
    "GradCache": "losses/general",
    "false negatives": "losses/general",
    "in-batch negatives": "losses/pairs",
    "two-tower": "losses/pairs",
}


@pytest.mark.parametrize("query", SEARCHES)
def test_a_search_finds_the_page(built, query):
    """All words of the query stand on the page, and some in its headings, which a search shows first."""
    index = json.loads((built / "searchindex.js").read_text().removeprefix("Search.setIndex(").rstrip(");\n"))
    page = index["docnames"].index(SEARCHES[query])
    words = [stemmer("english").stemWord(word) for word in re.findall(r"\w+", query.lower())]

    def pages_with(kind: str, word: str) -> list[int]:
        places = index[kind].get(word, [])
        return places if isinstance(places, list) else [places]

    words = [word for word in words if word not in SearchEnglish.stopwords]
    for word in words:
        assert page in pages_with("terms", word) + pages_with("titleterms", word), word
    if query not in ("in-batch negatives", "two-tower"):
        assert any(page in pages_with("titleterms", word) for word in words), "want the words in a heading"
