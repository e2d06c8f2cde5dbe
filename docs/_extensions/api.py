"""The reference pages: the directive `api` lists public names, and docstrings become reStructuredText.

    .. api:: fastqt
       contrastive_loss
       sigmoid_loss

shows a table of these names with a line on each, and then what their docstrings say.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole
from sphinx.util.inspect import signature, stringify_signature

# Names that a docstring may link to, whatever the module that it stands in.
PACKAGES = (
    "fastqt",
    "fastqt.nn",
    "fastqt.optim",
    "fastqt.distributed",
    "fastqt.promises",
    "fastqt.sentences.evaluation",
    "fastqt.integrations.huggingface",
    "fastqt.integrations.lightning",
    "fastqt.integrations.metric_learning",
    "fastqt.integrations.pylate",
    "fastqt.integrations.open_clip",
    "fastqt.integrations.sentence_transformers",
)
CODE = re.compile(r"(``?[^`]+``?)")


def summary(value: object) -> str:
    """The first sentence of a docstring that is fastqt's own."""
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return f"A constant: {type(value).__name__}."
    if not is_documented(value):
        return f"``{value.__module__}.{value.__qualname__}``"
    first = inspect.cleandoc(value.__doc__).split("\n\n")[0].replace("\n", " ")
    sentence = re.match(r".*?[.:](?= |$)", first)
    return escaped(sentence[0].rstrip(":") if sentence else first)


def is_documented(value: object) -> bool:
    """Whether a value has a docstring of fastqt, not that of its type or of torch."""
    return getattr(value, "__module__", "").startswith("fastqt") and bool(value.__doc__)


class Api(SphinxDirective):
    """The names of one package, each on a line of the directive's content."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        package = self.arguments[0]
        module = import_module(package)
        names = [line.strip() for line in self.content if line.strip()]
        lines = [".. highlight:: python", "", f".. currentmodule:: {package}", ""]
        lines += [".. list-table::", "   :class: summary", ""]
        for name in names:
            lines += [f"   * - :py:obj:`~{package}.{name}`", f"     - {summary(getattr(module, name))}"]
        for name in names:
            lines += ["", *self.entry(f"{package}.{name}", getattr(module, name))]
        return self.parse_text_to_nodes(StringList(lines, source=self.env.docname))

    @staticmethod
    def entry(name: str, value: object) -> list[str]:
        """The directive that shows one name."""
        if inspect.isclass(value) and not is_documented(value):
            return [f".. py:class:: {name}", "", f"   {summary(value)} itself, under a shorter name."]
        if inspect.isclass(value):
            return [f".. autoclass:: {name}", "   :members:", "   :exclude-members: function"]
        if inspect.isroutine(value):
            return [f".. autofunction:: {name}"]
        return [f".. py:data:: {name}", "", f"   Value: ``{value!r}``"]


def public_name(text: str, package: str | None) -> str | None:
    """The full name of what a docstring names, if it is public: first among the package's own names."""
    owner, _, name = text.rpartition(".")
    for place in [owner] if owner else [package, *PACKAGES]:
        if place in PACKAGES and name in getattr(import_module(place), "__all__", ()):
            return f"{place}.{name}"
    return None


class NameRole(SphinxRole):
    """What stands in single backticks: code, and a link where it is a public name."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        code = nodes.literal(self.text, self.text)
        if (full := public_name(self.text, self.env.ref_context.get("py:module"))) is None:
            return [code], []
        link = pending_xref("", code, refdomain="py", reftype="obj", reftarget=full, refdoc=self.env.docname)
        return [link], []


def escaped(line: str) -> str:
    """A line of plain text, without what reStructuredText reads as markup; code in backticks stays."""
    parts = CODE.split(line)
    for place in range(0, len(parts), 2):
        parts[place] = re.sub(r"([*|]|_(?=\W|$))", r"\\\1", parts[place])
    return "".join(parts)


def listed(lines: list[str]) -> list[str]:
    """A section Returns that describes several values, as a list."""
    made: list[str] = []
    values = [n for n, line in enumerate(lines) if re.match(r"    \w+: ", line)]
    start = lines.index("Returns:") if "Returns:" in lines else len(lines)
    end = next((n for n in range(start + 1, len(lines)) if lines[n] and lines[n][0] != " "), len(lines))
    several = sum(start < n < end for n in values) > 1
    for n, line in enumerate(lines):
        if several and start < n < end and line:
            line = f"    - {line[4:]}".replace(": ", " – ", 1) if n in values else f"      {line.strip()}"
        made.append(line)
    return made


def with_names_on_one_line(lines: list[str]) -> list[str]:
    """Arguments that share a description, whose names take two lines."""
    made: list[str] = []
    for line in lines:
        if made and re.fullmatch(r"    \w+(, \w+)*,", made[-1]):
            made[-1] += f" {line.strip()}"
        else:
            made.append(line)
    return made


def as_restructured_text(
    app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    """Docstrings are plain text: code is indented or begins with >>>, and `names` stand in backticks."""
    made: list[str] = []
    in_code = in_section = False
    given = listed(with_names_on_one_line(lines))
    for number, line in enumerate(given):
        if line and not line.startswith("    "):
            in_code = False
            in_section = re.fullmatch(r"[A-Z][a-z]+:", line) is not None
        prompt = line.lstrip().startswith((">>>", "..."))
        after_blank = number > 0 and not given[number - 1]
        if line.startswith("    ") and after_blank and not (in_section or in_code or prompt):
            made += ["::", ""]
            in_code = True
        made.append(line if in_code or prompt else escaped(line))
    lines[:] = made


def signature_of_init(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, given: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """The arguments of a class that checks them in `__new__`, which autodoc would show in their place."""
    if what != "class" or given is None or not given.startswith("(*args"):
        return None
    own = signature(obj.__init__, bound_method=True)
    return stringify_signature(own, show_return_annotation=False, unqualified_typehints=True), returns


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("api", Api)
    app.add_role("name", NameRole())
    app.connect("autodoc-process-signature", signature_of_init)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)  # before napoleon's
    return {"parallel_read_safe": True, "parallel_write_safe": True}
