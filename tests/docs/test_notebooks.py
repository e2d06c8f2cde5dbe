"""Pages that are notebooks too: the notebook has the code of the page, and what it prints is shown."""

import importlib.util
import re
import subprocess
import sys

import pytest

pytest.importorskip("nbclient", reason="the extra docs is not installed")
pytest.importorskip("ipykernel", reason="the extra docs is not installed")
pytest.importorskip("jupytext", reason="the extra docs is not installed")
pytest.importorskip("sphinx", reason="the extra docs is not installed")
import nbformat
from sphinx.errors import ExtensionError

from tests.shared.page_blocks import DOCS, PAGES, blocks

# A page with what a notebook treats apart: commands, a block that is no code, links, and no output.
PAGE = """# A page

[A link](other.md#a-part) and [an address](https://example.org).

```sh
make nothing
```

```python
x = 6 * 7
```

```text
x is shown
```

```python
import sys

print(f"x is {x}")
print("progress", file=sys.stderr)
x / 2
```
"""


def extension(name):
    """A module of docs/_extensions, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / "_extensions" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


notebooks = extension("notebooks")
(NAMES,) = re.findall(r"^notebook_pages = \((.*)\)$", (DOCS / "conf.py").read_text(), re.MULTILINE)
NAMES = [f"{name}.md" for name in re.findall(r'"([^"]+)"', NAMES)]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_the_code_of_its_page(name):
    notebook = notebooks.notebook_of(PAGES[name].read_text())
    nbformat.validate(notebook)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert code == [block.code.rstrip("\n") for block in blocks(PAGES[name], "python")]

    text = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    shell = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert shell == [block.code for block in blocks(PAGES[name], "sh")]
    assert ".md" not in re.sub(r"`[^`]*`", "", text)


@pytest.mark.slow  # it starts a kernel
def test_what_a_block_prints_stands_below_it():
    notebook = notebooks.notebook_of(PAGE)
    notebooks.run(notebook, "page")
    shown = notebooks.with_outputs(PAGE, notebook, "THE LINK")
    output = "````{code-block} text\n:class: output\n\nx is 42\n21.0\n````\n"
    assert shown == PAGE.replace("# A page\n", "# A page\n\nTHE LINK\n") + f"\n{output}"

    text = notebook.cells[0].source
    assert "A link and [an address](https://example.org)." in text
    assert "```sh\nmake nothing\n```" in text
    assert notebooks.notebook_of(PAGE) == notebooks.notebook_of(PAGE)


@pytest.mark.slow  # it starts a kernel
def test_a_block_that_raises_ends_the_build():
    notebook = notebooks.notebook_of("# A page\n\n```python\nx = 1 / 0\n```\n")
    with pytest.raises(
        ExtensionError, match=r"how-to/page: a block of Python raised(.|\n)*ZeroDivisionError"
    ):
        notebooks.run(notebook, "how-to/page")


# A process waits until what it has written to a pipe is read, and its parent ends with an error.
FAILING = """
import atexit, multiprocessing, sys
sys.path[:0] = ["docs/_extensions"]
from notebooks import end_processes

context = multiprocessing.get_context("fork")
_, writer = context.Pipe()
context.Process(target=writer.send, args=(bytes(1 << 20),)).start()
atexit.register(end_processes)
sys.exit(2)
"""


def test_a_build_that_fails_ends_also_where_its_processes_wait():
    command = [sys.executable, "-c", FAILING]
    assert subprocess.run(command, cwd=DOCS.parent, timeout=120).returncode == 2
