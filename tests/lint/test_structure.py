"""Each figure counts what it says and nothing beside it, and a count above its limit fails."""

import textwrap

import pytest

from tests.lint import structure
from tests.lint.structure import FIGURES, LIMITS, Source

FIELDS = [f"field{number}" for number in range(14)]
PROBLEM = "class Problem:\n" + "".join(f"    {name}: int\n" for name in FIELDS) + "    kind: ClassVar[str]\n"
PATHS = {
    "option_dictionaries": "fastqt/functional/call.py",
    "option_keys": "fastqt/losses/clip.py",
    "group_or_none": "fastqt/nn/queue.py",
}


def counted(name, text, path=None):
    """The lines that a figure counts in a file of this text."""
    source = Source(path or PATHS.get(name, "fastqt/any.py"), textwrap.dedent(text))
    return [line for _, line in FIGURES[name]([source])]


def listing(names, apart=1):
    return "".join(f"{name}{chr(10) * apart}" for name in names)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (listing(FIELDS[:12], apart=2), [1]),  # on 23 lines
        (listing(FIELDS[:11]), []),
        (listing([*FIELDS[:11], FIELDS[0], "kind", "field99"]), []),
        (listing(FIELDS[:12], apart=3), []),  # on 34 lines
        ("\n" + " ".join(FIELDS[:12]) + 30 * "\n" + " ".join(FIELDS), [1, 25]),
        (" ".join(FIELDS) + "\n" + " ".join(FIELDS), [1]),  # windows do not overlap
    ],
)
def test_fields_are_those_of_the_dataclass_in_any_language(text, lines):
    places = structure.fields([Source("fastqt/problem.py", PROBLEM), Source("csrc/problem.h", text)])
    assert [line for path, line in places if path == "csrc/problem.h"] == lines


def test_fields_want_the_dataclass():
    with pytest.raises(SystemExit, match="want a class Problem, got none"):
        list(structure.fields([Source("fastqt/problem.py", "class Other: pass")]))


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("option_dictionaries", "def f(o: dict[str, Any]) -> int: ...", [1]),
        ("option_dictionaries", "def f(o: dict[str, int]) -> dict[int, Any]: ...", []),
        ("option_keys", "def f(o: dict[str, Any]):\n    o['scale'] = o['bias']", [2, 2]),
        ("option_keys", "def f(**o: Any):\n    return o['scale']", [2]),
        ("option_keys", "def f(o: dict[str, int]):\n    return o['rows']", []),
        ("option_keys", "def f(o: dict[str, Any], name):\n    return o[name], Literal['scale']", []),
        ("second_losses", "def _over_group(): ...\ndef over_group(): ...\n_over_group()", [1]),
        ("group_or_none", "if group is None and x: ...\ny = 1 if group is not None else 2", [1, 2]),
        ("group_or_none", "if is_group(group) or self.group is None: ...", []),
        ("packs", "f(*(a, b), c)\nx = [*(d, e)]", [1, 2]),
        ("packs", "f(*a, *[b, c], (d, e))\nx = *a, b", []),
        ("vague_names", "found = f(given)\ndef g(own): ...", [1, 1, 2]),
        ("vague_names", "f(found=x.found, own_rows=1)  # given\n'own'", []),
    ],
)
def test_a_figure_counts_what_it_says(name, text, lines):
    assert sorted(counted(name, text)) == lines


@pytest.mark.parametrize("name", PATHS)
def test_figures_of_the_front_count_nothing_elsewhere(name):
    text = "def f(o: dict[str, Any]):\n    if group is None: o['scale']"
    assert counted(name, text)
    assert not counted(name, text, "fastqt/engines/cpu.py")


@pytest.mark.parametrize(
    ("statements", "lines"),
    [
        (["x = 1"] * 20, [1]),
        (["x = 1"] * 19, []),
        (["'''What it does.", "", "'''"] + ["x = 1"] * 20, [1]),
        (["'''What it does.'''", ""] + ["x = 1"] * 20, [1]),
        (["'''", *["text"] * 20, "'''", "x = 1"], []),
        (["x = 1"] * 10 + [""] + ["x = 1"] * 10, []),
        (["x = '''", "", "'''"] + ["x = 1"] * 20, [1]),  # a blank line of a string is no paragraph
    ],
)
def test_bodies_are_unbroken_without_a_blank_line(statements, lines):
    text = "def f():\n" + "".join(f"    {line}\n" if line else "\n" for line in statements)
    assert counted("unbroken_bodies", text + "\n\nx = 2\n") == lines


def test_row_scores_counts_files():
    sources = [
        Source("fastqt/problem.py", "row_scores\nrow_scores"),
        Source("csrc/cpu/problem.h", "// row_scores"),
        Source("kernels/loss_rows.py", "row_scores"),
        Source("fastqt/checks.py", ""),
    ]
    assert list(structure.row_scores(sources)) == [("fastqt/problem.py", 1), ("csrc/cpu/problem.h", 1)]


def test_a_count_above_its_limit_fails_and_prints_its_places(capsys):
    source = Source("fastqt/problem.py", PROBLEM + "f(*(a, b))\n")
    line = source.text.count("\n")
    limits = dict.fromkeys(LIMITS, (10**6, 0))
    assert structure.report([source], limits, []) == []
    assert structure.report([source], limits | {"packs": (1, 0)}, []) == []
    assert str(line) not in capsys.readouterr().out
    assert structure.report([source], limits | {"packs": (0, 0)}, ["packs"]) == ["packs"]
    assert f"  fastqt/problem.py:{line}\n" in capsys.readouterr().out


def test_unknown_figures_are_refused_in_words(capsys):
    assert structure.main(["pack"]) == 2
    assert capsys.readouterr().out.endswith("got pack\n")


def test_each_figure_has_a_limit():
    assert LIMITS.keys() == FIGURES.keys()
