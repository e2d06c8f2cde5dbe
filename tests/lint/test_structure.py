"""Each figure counts what it says and no more, a count above its limit fails, no imports are a circle."""

import ast
import textwrap
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.lint import structure
from tests.lint.structure import FIGURES, Source

FIELDS = [f"field{number}" for number in range(14)]
PROBLEM = "class Problem:\n" + "".join(f"    {name}: int\n" for name in FIELDS) + "    kind: ClassVar[str]\n"
PATHS = {
    "option_dictionaries": "fastqt/functional/call.py",
    "option_keys": "fastqt/losses/clip.py",
    "group_or_none": "fastqt/nn/queue.py",
    "forwarded": "fastqt/losses/clip.py",
    "option_records": "fastqt/losses/clip.py",
    "checks_in_bodies": "fastqt/losses/clip.py",
}


def counted(name, text, path=None):
    source = Source(path or PATHS.get(name, "fastqt/any.py"), textwrap.dedent(text))
    return [line for _, line in FIGURES[name]([source])]


def listing(names, apart=1):
    return "".join(f"{name}{chr(10) * apart}" for name in names)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (listing(FIELDS[:12], apart=2), [1]),  # on 23 lines
        (listing(FIELDS[:11]), []),
        (listing(FIELDS[:12], apart=3), []),  # on 34 lines
        ("\n" + " ".join(FIELDS[:12]) + 30 * "\n" + " ".join(FIELDS), [1, 25]),
        (" ".join(FIELDS) + "\n" + " ".join(FIELDS), [1]),  # windows do not overlap
    ],
)
def test_fields_are_those_of_the_dataclass_in_any_language(text, lines):
    places = structure.fields([Source("fastqt/problem.py", PROBLEM), Source("csrc/problem.h", text)])
    assert [line for path, line in places if path == "csrc/problem.h"] == lines


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("option_dictionaries", "def f(o: dict[str, Any]) -> int: ...", [1]),
        ("option_keys", "def f(o: dict[str, Any]):\n    o['scale'] = o['bias']", [2, 2]),
        ("option_keys", "def f(**o: Any):\n    return o['scale']", [2]),
        ("option_keys", "def f(o: dict[str, Any], name):\n    return o[name], Literal['scale']", []),
        ("second_losses", "def _over_group(): ...\ndef over_group(): ...\n_over_group()", [1]),
        ("group_or_none", "if group is None and x: ...\ny = 1 if group is not None else 2", [1, 2]),
        ("group_or_none", "if is_group(group) or self.group is None: ...", []),
        ("packs", "f(*(a, b), c)\nx = [*(d, e)]", [1, 2]),
        (
            "forwarded",
            "@loss('L')\ndef l(call, x, *, scale, mix): ...\nf(scale=scale, x=x)\nf(dtype=dtype, mix=scale)",
            [3],
        ),
        ("option_records", "class A:\n  scale: X\n  memory: X\n  backend: X\nclass B:\n  scale: X", [1]),
        (
            "checks_in_bodies",
            "@loss()\ndef l(call):\n    check_scale(1)\ndef _fit():\n    check_scale(1)",
            [3],
        ),
        ("vague_names", "found = f(given)\ndef g(own): ...", [1, 1, 2]),
        ("vague_names", "f(found=x.found, own_rows=1)  # given\n'own'", []),
    ],
)
def test_a_figure_counts_what_it_says(name, text, lines):
    assert sorted(counted(name, text)) == lines


@pytest.mark.parametrize(
    ("statements", "lines"),
    [
        (["x = 1"] * 20, [1]),
        (["x = 1"] * 19, []),
        (["'''What it does.", "", "'''"] + ["x = 1"] * 20, [1]),
        (["x = 1"] * 10 + [""] + ["x = 1"] * 10, []),
        (["x = '''", "", "'''"] + ["x = 1"] * 20, [1]),  # a blank line of a string is no paragraph
    ],
)
def test_bodies_are_unbroken_without_a_blank_line(statements, lines):
    text = "def f():\n" + "".join(f"    {line}\n" if line else "\n" for line in statements)
    assert counted("unbroken_bodies", text + "\n\nx = 2\n") == lines


def imported(source: Source, modules: set[str]) -> set[str]:
    """The modules among these that a file imports anywhere: also in functions and for type checkers."""
    names = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            of_module = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= of_module & modules or {node.module}
    return names & modules


def circle(sources: list[Source]) -> list[str]:
    """The modules along a circle of imports, of which there is none if this is empty."""
    by_name = {}
    for source in sources:
        path = (
            source.path.replace("kernels/", "fastqt/kernels/", 1)
            if source.is_in(("kernels",))
            else source.path
        )
        by_name[path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = source
    try:
        TopologicalSorter(
            {x: imported(source, set(by_name)) - {x} for x, source in by_name.items()}
        ).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other():
    """The contract in pyproject.toml says which way layers import; this is for the files of a layer."""
    sources = [
        x for x in structure.read(structure.ROOT) if x.is_in(("fastqt", "kernels")) and x.path.endswith(".py")
    ]
    assert len(sources) > 200
    assert circle(sources) == []
