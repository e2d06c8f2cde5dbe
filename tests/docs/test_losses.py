"""Every public loss has a section that says what it is, when to use it, and where its code and tests are."""

import re

import pytest

import fastqt
from tests.shared.page_blocks import DOCS, ROOT

PUBLIC = [name for name in fastqt.__all__ if name.endswith("_loss") or name == "log_sum_exp"]
OVERVIEW = (DOCS / "losses.md").read_text()
FACTS = ("When", "Migration", "Arguments", "Cost", "Source", "Tested by")


def sections() -> dict[str, str]:
    """The sections of the second level on the losses' pages, by their headings."""
    by_heading = {}
    for page in sorted(DOCS.glob("losses/*.md")):
        for part in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
            heading, text = part.split("\n", 1)
            by_heading[heading] = text
    return by_heading


SECTIONS = sections()
OF_LOSSES = [heading for heading in SECTIONS if any(f"`{name}`" in heading for name in PUBLIC)]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_loss_has_a_heading_and_a_row(name):
    assert [heading for heading in SECTIONS if f"`{name}`" in heading], f"no heading has `{name}`"
    assert f"| `{name}` |" in OVERVIEW


@pytest.mark.parametrize("heading", OF_LOSSES)
def test_the_section_of_a_loss_is_whole(heading):
    """It has a formula, and each fact once, with links to the reference."""
    text = SECTIONS[heading]
    (name,) = (name for name in PUBLIC if f"`{name}`" in heading)

    assert "$$" in text
    assert [fact for fact in FACTS if text.count(f"- **{fact}:**") != 1] == []
    assert f"../api/losses.rst#fastqt.{name})" in text
    assert re.search(r"\*\*Migration:\*\*[^*]*(\]\(\.\./|`)", text), "want a link or code for the migration"


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_tests_that_a_section_names_exist(heading):
    for path in re.findall(r"\btests/[\w/]+(?:\.py|/)?", SECTIONS[heading]):
        assert (ROOT / path).exists(), path
