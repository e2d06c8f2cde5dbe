"""fastqt analogy, on a planted text and on novels."""

import re
from pathlib import Path

import pytest

from fastqt.sentences.cli import main
from tests.shared.command_lines import SMALL, error_line
from tests.shared.novels import novel


def ask(model, pool, a, b, c, *options):
    return main(["analogy", model, pool, "--a", a, "--b", b, "--c", c, *options])


def test_answers_are_printed_like_neighbours(model, planted, capsys):
    lines = Path(planted[0]).read_text().splitlines()
    a, c = lines[0], lines[8]
    assert ask(model, planted[0], a, a, c, "-k", "3") == 0
    question, first, *others = capsys.readouterr().out.splitlines()
    assert question == f"{a} : {a} :: {c} :"
    assert first == f"  1.000  {c}  ({planted[0]}:9)"
    assert len(others) == 2
    assert ask(model, planted[0], a, a, c, "-k", "2", "--exclude") == 0
    assert f"  {c}  (" not in capsys.readouterr().out


def test_an_analogy_of_novels(tmp_path, capsys):
    pool = novel(tmp_path / "pool.txt", 400)
    run = str(tmp_path / "run")
    assert main(["train", pool, "--out", run, *SMALL, "--steps", "5"]) == 0
    capsys.readouterr()
    assert ask(run, pool, "He is here.", "They are here.", "He was walking on the road.") == 0
    _, *found = capsys.readouterr().out.splitlines()
    assert len(found) == 5
    text = Path(pool).read_text().splitlines()
    cosines = []
    for line in found:
        cosine, sentence, number = re.fullmatch(rf"  (-?\d\.\d+)  (.*)  \({pool}:(\d+)\)", line).groups()
        assert text[int(number) - 1].strip() == sentence
        cosines.append(float(cosine))
    assert cosines == sorted(cosines, reverse=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--a", " "], "a: want a sentence, got blank text"),
        (["-k", "0"], "k: want at least 1, got 0"),
        (["-k", "many"], "argument -k: want a whole number, got 'many'"),
    ],
)
def test_errors(model, planted, capsys, change, message):
    words = ["analogy", model, planted[0], "--a", "x", "--b", "y", "--c", "z", *change]
    assert message in error_line(capsys, *words)


def test_a_question_without_c_is_refused(model, planted, capsys):
    words = ["analogy", model, planted[0], "--a", "x", "--b", "y"]
    assert "the following arguments are required: --c" in error_line(capsys, *words)
