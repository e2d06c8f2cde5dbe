"""One figure for a fact: no two pages state different figures, and none differs from the code.

Figures of stored runs are rendered between markers, and other tests compare them with the runs. What is typed
into sentences and tables is a constant of the code, a figure of the literature, or a size that a page
chooses. A fact of the code, or of several pages, has its one figure here.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from fastqt.engines.chunked import walk
from fastqt.engines.cpu import contrastive as cpu
from fastqt.engines.triton import contrastive as triton
from fastqt.engines.triton import operands
from fastqt.kernels import tuning
from fastqt.machine import verdicts
from fastqt.nn import masked_words
from fastqt.sentences.cli import check as check_command
from fastqt.sentences.inference import index
from fastqt.sentences.inference.export import onnx_file
from fastqt.sentences.text import reader, vocabulary
from tests.shared.page_blocks import DOCS, ROOT

FRONT = (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
# Each page by its path in the repository.
PAGES = {path.relative_to(ROOT).as_posix(): path for path in (*FRONT, *sorted(DOCS.rglob("*.md")))}

RENDERED = re.compile(r"<!-- results: (?P<name>[\w ]+) -->\n(?P<text>.*?)\n<!-- end -->", re.DOTALL)
CODE = re.compile(r"^ *```(?P<language>\w*)\n(?P<code>.*?)^ *```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
UNIT = r"×|ms|µs|[KMG]i?B|%|[GT]FLOPs?(?:/s)?|times|points|seconds?|s|minutes?|hours?"
WORDS = "half an?|one|two|three|four|five|six|seven|ten|twenty|thirty"
FIGURE = re.compile(
    rf"(?<![\w.,^√×])(?<!× )(?:\d[\d,.]*\d|\d) ?(?:{UNIT})(?!\w)(?! ?\d)(?! times)"
    rf"|\b(?:(?:{WORDS}) (?:second|minute|hour)s?|an? (?:minute|hour))\b"
)


def typed(text: str) -> list[str]:
    """The figures of a page in their order, without those that are rendered and those of code.

    Blocks for the shell are looked at, because their comments say how long a command takes.
    """
    text = RENDERED.sub("", text)
    text = CODE.sub(lambda code: code["code"] if code["language"] == "sh" else "", text).replace("\n", " ")
    return [match[0] for match in FIGURE.finditer(text)]


def rendered_sections() -> dict[str, dict[str, str]]:
    """What is between the markers of each name, by page."""
    sections: dict[str, dict[str, str]] = {}
    for page, path in PAGES.items():
        for match in RENDERED.finditer(path.read_text()):
            sections.setdefault(match["name"], {})[page] = match["text"]
    return sections


def of_bytes(count: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):g} {unit}"
    return f"{count} bytes"


def share(part: float) -> str:
    return f"{100 * part:g} %"


# Each fact, and its figure: from the code, where the code has it.
FACTS: dict[str, str | Callable[[], str]] = {
    "memory of a chunk on a CPU": lambda: of_bytes(cpu.CHUNK_BYTES),
    "scores that are kept on a CPU": lambda: of_bytes(cpu.KEPT_BYTES),
    "scores that are kept on a GPU": lambda: of_bytes(triton.KEPT_BYTES),
    "memory=low on a CPU": lambda: of_bytes(cpu.LOW_BYTES),
    "memory of the engine torch on a CPU": lambda: of_bytes(walk.ROOM["cpu"][0]),
    "memory=low of the engine torch on a CPU": lambda: of_bytes(walk.ROOM["cpu"][1]),
    "memory of the engine torch elsewhere": lambda: of_bytes(walk.ROOM_ELSEWHERE[0]),
    "memory=low on other devices": lambda: of_bytes(walk.ROOM_ELSEWHERE[1]),
    "memory on a GPU, at least": lambda: of_bytes(operands.FAST_BYTES),
    "memory=low on a GPU": lambda: of_bytes(operands.LOW_BYTES),
    "E of a launch that is repeated": lambda: of_bytes(tuning.REPEATED_BYTES),
    "weights in one ONNX file": lambda: of_bytes(onnx_file.ONE_FILE),
    "largest tokenizer file": lambda: of_bytes(vocabulary.LARGEST_FILE),
    "longest row of text": lambda: of_bytes(reader.LONGEST_LINE),
    "sample of a build of an index": lambda: f"{index.TRAINED_BYTES >> 20} MiB",
    "recall of an index": lambda: share(index.IndexOptions().min_recall),
    "tokens that are masked": lambda: share(masked_words.CHOSEN),
    "masked tokens that become the mask": lambda: share(masked_words.MASKED),
    "masked tokens that become random": lambda: share(masked_words.RANDOM),
    "masked tokens that stay": lambda: share(1 - masked_words.MASKED - masked_words.RANDOM),
    "error that fastqt check allows": lambda: f"{verdicts.EAGER_FACTOR:g} times",
    "time of fastqt check": lambda: {60.0: "a minute"}[check_command.SECONDS],
    "counts may rise": "2 %",
    "time of make test": "seven minutes",
    "predicted products of a GPU": "560 TFLOP/s",
}

# The facts that a page states, or the figure of what it alone states, in its order, between semicolons.
STATED = {
    "README.md": "time of make test",
    "CONTRIBUTING.md": "time of make test; three seconds; counts may rise; time of fastqt check",
    "docs/architecture.md": "64 times",
    "docs/benchmarks.md": (
        "1.33 ×; predicted products of a GPU; 90 %; 1.5 µs; 54.3 ms; 48.8 ms; 47 ms; a minute; "
        "200 times; twenty seconds; two hours; 32 MiB"
    ),
    "docs/choosing.md": "memory of a chunk on a CPU",
    "docs/concepts.md": "memory of a chunk on a CPU; memory=low on a CPU",
    "docs/devices.md": (
        "memory of the engine torch on a CPU; memory of the engine torch elsewhere; "
        "memory=low of the engine torch on a CPU; memory=low on other devices; "
        "scores that are kept on a GPU; scores that are kept on a GPU; 64 KiB"
    ),
    "docs/distributed.md": "predicted products of a GPU; 0 %",
    "docs/evaluation.md": "1.5 GB",
    "docs/how-to/evaluate.md": "80 %; 1.8 points",
    "docs/how-to/export.md": "weights in one ONNX file",
    "docs/how-to/gpu.md": (
        "time of fastqt check; error that fastqt check allows; time of fastqt check; "
        "memory on a GPU, at least; memory=low on a GPU"
    ),
    "docs/how-to/retriever.md": "5 %",
    "docs/how-to/search.md": "recall of an index",
    "docs/integrations.md": ("longest row of text; largest tokenizer file; sample of a build of an index"),
    "docs/kernels.md": (
        "memory of a chunk on a CPU; scores that are kept on a CPU; E of a launch that is repeated; "
        "counts may rise"
    ),
    "docs/losses/general.md": (
        "memory of a chunk on a CPU; memory on a GPU, at least; memory=low on a CPU; memory=low on a GPU; "
        "scores that are kept on a GPU; scores that are kept on a CPU"
    ),
    "docs/losses/views.md": (
        "tokens that are masked; masked tokens that become the mask; masked tokens that become random; "
        "masked tokens that stay"
    ),
    "docs/papers.md": (
        "an hour; 1,000 times; 95 %; 6.5 hours; a minute; 20 times; 1 %; 1 %; 10 %; 4 points; 1.5 GFLOP; 6 %"
    ),
    "docs/peers.md": "18 GiB; half a minute",
    "docs/trainings.md": "an hour",
}


def facts_of(page: str) -> list[str]:
    return STATED[page].split("; ") if page in STATED else []


def figure_of(fact: str) -> str:
    figure = FACTS.get(fact, fact)
    return figure if isinstance(figure, str) else figure()


@pytest.mark.parametrize("page", PAGES)
def test_a_typed_figure_is_that_of_its_fact(page):
    """A figure that is not listed here is new: list it, or render it from a stored run."""
    assert typed(PAGES[page].read_text()) == [figure_of(fact) for fact in facts_of(page)]


def test_each_fact_is_stated_somewhere():
    assert set(FACTS) <= {fact for page in STATED for fact in facts_of(page)}


def test_a_rendered_section_is_the_same_on_all_pages():
    for name, texts in rendered_sections().items():
        assert len(set(texts.values())) == 1, f"{name}: {', '.join(texts)}"


def test_the_sentence_of_the_front_page_has_the_figures_of_its_table():
    """The largest batch is also the last row of the table below it."""
    sections = rendered_sections()
    for page in ("README.md", "docs/index.md"):
        rows, _, *mebibytes, _, block_s, plain_s = cells(sections["batch"][page].splitlines()[-1])
        sentence, (block_mib, plain_mib) = sections["largest"][page], mebibytes
        parts = (
            f"N = {rows} ",
            f"took {plain_mib} MiB beside",
            f"and {plain_s} s.",
            f"{block_mib} MiB and {block_s} s",
        )
        for figure in parts:
            assert figure in sentence, f"{page}: {figure}"


# Columns that say what is measured in a row; the others of a table are figures.
SIZES = ("N", "rows N", "D", "M", "K", "batch", "loss", "memory", "dtype", "dims", "targets")
MEASURED = re.compile(r"MiB$|ms$| s$|× GEMMs$")
# Sections that measure another thing than the loss of their columns alone, and what it is.
OTHER_THINGS = {
    "matryoshka": "prefixes",
    "margin": "with a margin",
    "torch engine": "on the engine torch",
    "bfloat16 intel": "on a processor of Intel",
}


def measured_cells(text: str) -> list[tuple[tuple[str, ...], str]]:
    """The measured cells of a page's tables, each with what it is of: the thing, its sizes and its column."""
    found = []
    for table in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = map(cells, table[0].splitlines())
        sections = re.findall(r"<!-- (?:results: ([\w ]+)|end) -->", text[: table.start()])
        thing = OTHER_THINGS.get(sections[-1] if sections else "", "the loss")
        for row in rows if {"N", "rows N"} & set(head) else ():
            sizes = [f"{name} {value}" for name, value in zip(head, row, strict=True) if name in SIZES]
            for name, value in zip(head, row, strict=True):
                if name not in SIZES and MEASURED.search(name):
                    found.append(((thing, *sizes, name), value))
    return found


def contradictions(pages: dict[str, str]) -> list[str]:
    """The cells that have two values, with the pages of both."""
    first: dict[tuple[str, ...], tuple[str, str]] = {}
    told = []
    for page, text in pages.items():
        for of, value in measured_cells(text):
            other, place = first.setdefault(of, (value, page))
            if other != value:
                told.append(f"{', '.join(of)}: {other} in {place}, {value} in {page}")
    return told


def test_no_measured_cell_has_two_values():
    """What is measured of the same thing at the same sizes, on whatever pages it stands."""
    texts = {page: path.read_text() for page, path in PAGES.items()}
    assert sum(len(measured_cells(text)) for text in texts.values()) > 300
    assert contradictions(texts) == []

    cell = "| N | D | memory | plain PyTorch MiB |\n| --- | --- | --- | --- |\n| 4,096 | 768 | fast | {} |\n"
    stated = next(
        value for of, value in measured_cells(texts["docs/benchmarks.md"]) if of == measured_cells(cell)[0][0]
    )
    assert contradictions(texts | {"another": cell.format(stated)}) == []
    (told,) = contradictions(texts | {"another": cell.format("302")})
    assert told.endswith(f"plain PyTorch MiB: {stated} in docs/benchmarks.md, 302 in another")


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("| ").split("|")]


@pytest.mark.parametrize(
    ("sentence", "figures"),
    [
        ("it takes 48 MiB, or 1,000 times as much, in 2.6 s", ["48 MiB", "1,000 times", "2.6 s"]),
        ("half a minute, a second model, and 20% of 14 × 32 numbers", ["half a minute", "20%"]),
        ("N × N scores, √2 times the absolute, `24 MiB`", []),
        (
            "```sh\nmake demo  # half a minute\n```\n```python\nx = 3  # 2 s\n```\n3 ms",
            ["half a minute", "3 ms"],
        ),
        ("<!-- results: batch -->\n| 48 MiB |\n<!-- end -->", []),
    ],
)
def test_figures_are_found(sentence, figures):
    assert typed(sentence) == figures
