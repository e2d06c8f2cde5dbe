"""A text that every machine has: the prose in the docstrings of Python's library, NumPy and PyTorch."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy
import torch

DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
PARAGRAPH_END = re.compile(r"\n\s*\n")
# Folders of code that is not a package's own, or that was written to test it.
OTHERS = {"site-packages", "dist-packages", "test", "tests", "testing", "_vendor", "idlelib", "lib2to3"}
PROSE = re.compile(r"""[A-Z("'].*[.:?!)]""", re.DOTALL)
NOT_PROSE = re.compile(r"::=|>>>|->|\.\.\. |\+--|==|\|")
SENTENCE_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<=[.?!])\s+(?=[A-Z\"'(])")


def folders() -> tuple[Path, ...]:
    """Where the sources are that fastqt's own dependencies bring."""
    packages = (Path(str(package.__file__)).parent for package in (numpy, torch))
    return (Path(sysconfig.get_paths()["stdlib"]), *packages)


def read_library(roots: Sequence[Path]) -> list[list[str]]:
    """The prose of docstrings in folders of Python sources: of each module that has some, its sentences.

    Paragraphs that are repeated are left out.
    """
    documents: list[list[str]] = []
    seen: set[str] = set()
    for path in _modules(roots):
        sentences: list[str] = []
        for docstring in DOCSTRING.findall(path.read_text(encoding="utf-8", errors="replace")):
            for prose in map(_prose, PARAGRAPH_END.split(docstring)):
                if prose and prose not in seen:
                    seen.add(prose)
                    sentences += SENTENCE_END.split(prose)
        if sentences:
            documents.append(sentences)
    return documents


def _modules(roots: Sequence[Path]) -> Iterator[Path]:
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if OTHERS.isdisjoint(path.relative_to(root).parts):
                yield path


def _prose(paragraph: str) -> str:
    """A paragraph on one line and without markup; "" for code, tables, headings and signatures."""
    text = " ".join(paragraph.split())
    text = re.sub(r"^(\* |[0-9]+\. |\[[0-9]+\] )", "", text)
    text = re.sub(r":\w+:`~?([^`<]*)[^`]*`", r"\1", text)
    text = re.sub(r"[*\"`]|\[[0-9]+\]", "", text)
    words = re.findall(r"[A-Za-z]+", text)
    wordy = len(words) >= 5 and sum(map(len, words)) >= 0.7 * len(text.replace(" ", ""))
    return text if wordy and PROSE.fullmatch(text) and not NOT_PROSE.search(text) else ""
