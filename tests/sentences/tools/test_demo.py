"""The demonstration: its text is prose, it ends with what it has learnt, and a seed determines it."""

import re

import pytest

from fastqt.errors import InputError
from fastqt.machine import times
from fastqt.sentences.cli import main
from fastqt.sentences.tools import demo, library_text

NAMES = ("list", "file", "array", "string", "number", "class")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Forty modules whose docstrings tell stories of different things."""
    folder = tmp_path / "library"
    folder.mkdir()
    for number in range(40):
        name = NAMES[number % len(NAMES)]
        story = f"The {name} of part {number} has %d of its elements in order."
        sentences = " ".join(story % place for place in range(40))
        (folder / f"module{number}.py").write_text(f'def f():\n    """{sentences}"""\n')
    monkeypatch.setattr(demo, "folders", lambda: (folder,))
    monkeypatch.setattr(times, "ON_CPU", (64, 16))
    monkeypatch.setitem(demo.SETTINGS, "batch_size", 100)
    monkeypatch.setitem(demo.SETTINGS, "valid_every", 10)
    return folder


def without_times(text):
    """The output of the demonstration without what was measured."""
    text = re.sub(r"((?:InfoNCE|CLIP) .*?) +[\d.,]+ +[-\d,]+\n", r"\1\n", text)
    return re.sub(r"\n[\d.]+( s in all)", r"\1", text)


def test_the_demo(library, capsys):
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    # The product comes first, then what is learnt, beside the model before it and beside chance.
    places = [out.index(text) for text in ("eager PyTorch", "untrained", "chance", demo.QUERIES[0])]
    assert places == sorted(places)
    shares = dict(re.findall(r"^ +(\d+|chance) +([\d.]+)%", out, re.MULTILINE))
    assert list(shares) == ["0", "10", "20", "28", "chance"]
    assert float(shares["chance"]) == 2.0
    assert len(re.findall(r"^ +(untrained|trained)  -?\d\.\d\d  The ", out, re.MULTILINE)) == 6

    assert main(["demo", "--seed", "0"]) == 0
    assert without_times(capsys.readouterr().out) == without_times(out)
    assert main(["demo", "--seed", "1"]) == 0
    assert without_times(capsys.readouterr().out) != without_times(out)


def test_the_demo_without_sources(library):
    for path in list(library.iterdir())[5:]:
        path.unlink()
    with pytest.raises(InputError, match="want at least 1,000 sentences of docstrings under "):
        library_text.read_library((library,))


def test_the_text_of_the_demo_is_prose():
    documents = library_text.read_library(library_text.folders()[:1])
    sentences = [sentence for document in documents for sentence in document]
    assert len(sentences) > 5000
    assert not any(mark in sentence for sentence in sentences for mark in (">>>", "::=", "+--", "\n"))
    assert sum(sentence[-1] in ".:?!)'" for sentence in sentences) > 0.99 * len(sentences)
    assert len(set(sentences)) > 0.95 * len(sentences)


def test_code_of_others_and_repeated_paragraphs_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(library_text, "LEAST", 1)
    story = "There is a sentence here. And here is another one of them."
    for name in ("a", "b", "site-packages/c", "tests/d"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        more = f"\n\nThis is the paragraph of :class:`~package.{path.stem}` alone."
        path.write_text(f'"""{story}{more}\n\n>>> f(x) + g(y)\n"""')
    first, second = library_text.read_library((tmp_path,))
    assert first == [*story.replace(". ", ".|").split("|"), "This is the paragraph of package.a alone."]
    assert second == ["This is the paragraph of package.b alone."]
