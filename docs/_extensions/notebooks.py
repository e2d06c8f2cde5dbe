"""Pages that are notebooks too: their blocks of Python are run, and the site shows what they print.

The page is the only source. When Sphinx reads one of `notebook_pages`, jupytext makes a notebook of its
text, and nbclient runs it in a process of its own. What a block prints is shown below the block, and the
notebook, with these outputs, is a file to download. A block that raises an error ends the build.
"""

from __future__ import annotations

import atexit
import os
import re
import tempfile
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from traitlets.config import Config

SECONDS = 120  # for one block, after which the build ends
BLOCK = re.compile(r"^```python\n.*?^```$", re.DOTALL | re.MULTILINE)
IS_TEXT = ".noeval"  # by which jupytext knows a block that becomes no cell
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:)[^)\s]+\)")
# Each kernel would print the debugger's remark on the modules of Python, and IPython would keep a history.
KERNEL = {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}
OPTIONS = ["--HistoryManager.enabled=False"]


def notebook_of(text: str) -> NotebookNode:
    """A page as a notebook that has not been run.

    Args:
        text: a Markdown page. Its blocks of Python become cells of code. Blocks for the shell stay blocks of
            the text, because a reader chooses when to run them. Links to other pages, which do not lie beside
            the notebook, leave their text.
    """
    notebook = jupytext.reads(text.replace("```sh\n", f"```sh {IS_TEXT}\n"), "md")
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # a notebook of the same page is the same file
        if cell.cell_type == "markdown":
            cell.source = LINK.sub(r"\1", cell.source).replace(f"```sh {IS_TEXT}\n", "```sh\n")

    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    return notebook


def run(notebook: NotebookNode, name: str) -> None:
    """Runs the cells of a notebook, in an empty folder, and stores their outputs in it.

    Raises:
        ExtensionError: a cell raised an error, which is shown under the page's name.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        sockets = {"transport": "ipc", "ip": f"{folder}/kernel"}  # files, and no ports of the machine
        options = {"timeout": SECONDS, "record_timing": False, "extra_arguments": OPTIONS}
        options["config"] = Config({"KernelManager": sockets})
        client = NotebookClient(notebook, kernel_name="python3", resources=place, **options)
        try:
            client.execute(env={**os.environ, **KERNEL, "IPYTHONDIR": folder})
        except CellExecutionError as error:
            raise ExtensionError(f"{name}: a block of Python raised an error: {error}") from error


def printed(cell: NotebookNode) -> str:
    """What a cell has printed, and the value of its last line; not what is about its progress."""
    parts = [
        output.text if output.output_type == "stream" else output.data.get("text/plain", "")
        for output in cell.outputs
        if output.get("name") != "stderr"
    ]
    return "\n".join(part.rstrip("\n") for part in parts)


def with_outputs(text: str, notebook: NotebookNode, link: str) -> str:
    """The page with what each block printed below it, and with a link to the notebook below its title."""
    cells = iter([cell for cell in notebook.cells if cell.cell_type == "code"])

    def block(match: re.Match[str]) -> str:
        if not (output := printed(next(cells))):
            return match[0]
        return f"{match[0]}\n\n````{{code-block}} text\n:class: output\n\n{output}\n````"

    title, rest = BLOCK.sub(block, text).split("\n", 1)
    return f"{title}\n\n{link}\n{rest}"


def run_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Runs a page that is a notebook too, before its links are made those of the site."""
    if docname not in app.config.notebook_pages:
        return
    notebook = notebook_of(source[0])
    run(notebook, docname)

    path = Path(app.doctreedir) / "notebooks" / f"{docname}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    page = Path(app.env.doc2path(docname))
    way = Path(os.path.relpath(path, page.parent)).as_posix()
    link = f"{{download}}`This page as a notebook <{way}>`, which was run when the site was built."
    source[0] = with_outputs(source[0], notebook, link)


def end_processes() -> None:
    """Ends what a failed build has left running: Python would wait for it, and it until Sphinx reads."""
    for process in active_children():
        process.terminate()


def setup(app: Sphinx) -> dict[str, Any]:
    atexit.register(end_processes)
    app.add_config_value("notebook_pages", (), "env", (tuple, list))
    app.connect("source-read", run_page, priority=400)  # before the one of `repository`
    return {"parallel_read_safe": True, "parallel_write_safe": True}
