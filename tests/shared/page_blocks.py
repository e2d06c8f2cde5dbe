"""The code blocks of the pages of the documentation, and the commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Each page by its name within docs/, such as how-to/train.md.
PAGES = {
    str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md")) if path.parent.name[0] != "_"
}

FENCE = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*) -->\n+)?^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Attributes:
        language: what is written after the fence.
        code: its lines.
        section: the heading above it; "" if there is none.
        line: where it begins.
        above: the last line of text above it.
        reason: why it is not run with its page, by the comment `<!-- not run: … -->` above it; "" if it is.
    """

    language: str
    code: str
    section: str
    line: int
    above: str
    reason: str


def blocks(path: Path, *languages: str) -> list[Block]:
    """The blocks of a page in these languages, or in all, in their order."""
    text = path.read_text()
    headings = list(HEADING.finditer(FENCE.sub(lambda found: "." * len(found[0]), text)))
    found = []
    for match in FENCE.finditer(text):
        if languages and match["language"] not in languages:
            continue
        sections = [heading[1] for heading in headings if heading.start() < match.start()]
        above = [line for line in text[: match.start()].splitlines() if line.strip()]
        note = match["note"] or ""
        indent = len(match["indent"])
        code = "".join(line[indent:] for line in match["code"].splitlines(keepends=True))
        found.append(
            Block(
                *(match["language"], code, sections[-1] if sections else ""),
                text[: match.start("code")].count("\n") + 1,
                *(above[-1] if above else "", note.removeprefix("not run: ") if "not run: " in note else ""),
            )
        )
    return found


def commands(code: str) -> list[list[str]]:
    """The words of each command of a block for the shell.

    Loops over words are gone through with their first word, and what stands behind a pipe, a redirection or
    && is another command or left out.
    """
    values: dict[str, str] = {}
    found = []
    for line in code.replace("\\\n", " ").splitlines():
        line = re.sub(r"^\s*(\$ )?", "", line)
        for name, value in values.items():
            line = re.sub(rf"\$\{{?{name}\b\}}?", value, line)
        words = shlex.split(line, comments=True)
        if words[:1] == ["for"]:
            values[words[1]] = words[3].rstrip(";")
        if not words or words[0] in ("for", "do", "done"):
            continue
        while words and re.fullmatch(r"\w+=\S*", words[0]):
            words = words[1:]
        command: list[str] = []
        for word in [*words, "&&"]:
            if word in ("&&", "|", ";", "||"):
                found += [command] if command else []
                command = []
            elif word == ">":
                command = [*command, word]
            else:
                command.append(word)
        found[-1] = found[-1][: found[-1].index(">")] if ">" in found[-1] else found[-1]
    return found


def of_fastqt(command: list[str]) -> list[str] | None:
    """What follows `fastqt`, `python -m fastqt` or `torchrun … -m fastqt`; None of another command."""
    if command[0] == "fastqt":
        return command[1:]
    if command[0] in ("python", "torchrun") and "fastqt" in command:
        at = command.index("fastqt")
        return command[at + 1 :] if command[at - 1] == "-m" else None
    return None


def headings(path: Path) -> dict[str, str]:
    """The headings of a page by their anchors on GitHub: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"^ *(```+|:::+).*?^ *\1 *$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    by_anchor: dict[str, str] = {}
    for heading in HEADING.findall(text):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        number, anchor = 0, slug
        while anchor in by_anchor:
            number += 1
            anchor = f"{slug}-{number}"
        by_anchor[anchor] = heading
    return by_anchor
