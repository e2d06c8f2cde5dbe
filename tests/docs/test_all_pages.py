"""Blocks of Python of all pages run, and commands are those that the command line takes.

A block that cannot run with its page says why in a comment above it: <!-- not run: it needs a GPU -->
"""

import contextlib
import importlib.util
import re
from pathlib import Path

import pytest
import torch

from fastqt.sentences.cli import main
from fastqt.sentences.cli.arguments import build_parser
from tests.shared.page_blocks import DOCS, PAGES, ROOT, blocks, commands, headings, of_fastqt
from tests.shared.page_names import LINES, NAMES

# Pages whose blocks other tests run: they compare blocks with each other, or give commands small settings.
RUN_BY = {
    "quick-start.md": "test_quick_start.py",
    **dict.fromkeys(("migrating.md", "choosing.md", "faq.md"), "test_pages.py"),
    **{name: "test_pages.py" for name in PAGES if name.startswith("how-to/")},
}
SLOW = {"distributed.md", "evaluation.md", "integrations.md"}
# Pages whose commands are run one after the other. Others train for long, or have tests of their own.
RUN = ["quick-start.md"]
# The texts that these commands read.
TEXTS = ("novels.txt", "held-out.txt", "sentences.txt")

SHELLS = ("sh", "bash", "shell", "console")
MAKE = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def with_python() -> list:
    return [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, path in PAGES.items()
        if name not in RUN_BY and any(not block.reason for block in blocks(path, "python"))
    ]


@pytest.fixture
def no_group_left():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*pin_memory.*")
@pytest.mark.parametrize("name", with_python())
def test_python_runs(name, tmp_path, monkeypatch, no_group_left):
    monkeypatch.chdir(tmp_path)
    names = NAMES[name](tmp_path, monkeypatch) if name in NAMES else {}
    names["__name__"] = "__main__"
    for block in blocks(PAGES[name], "python"):
        if not block.reason:
            exec(compile("\n" * (block.line - 1) + block.code, str(PAGES[name]), "exec"), names)


@pytest.mark.parametrize("name", [name for name in RUN_BY if name in PAGES])
def test_pages_with_a_test_of_their_own_have_one(name):
    test = (Path(__file__).parent / RUN_BY[name]).read_text()
    assert f'"{name}"' in test or f'"{Path(name).stem}"' in test


def all_blocks() -> list:
    """Every block for the shell of the pages and the README."""
    paths = {"README.md": ROOT / "README.md", **PAGES}
    return [
        pytest.param(block, id=f"{name}-{number}")
        for name, path in paths.items()
        for number, block in enumerate(blocks(path, *SHELLS))
    ]


@pytest.mark.parametrize("block", all_blocks())
def test_commands_are_taken(block, capsys):
    """An option that does not exist, or a value of a wrong kind, ends the parser."""
    for command in commands(block.code):
        if (arguments := of_fastqt(command)) is not None:
            with contextlib.suppress(SystemExit):
                build_parser().parse_args([word for word in arguments if word != "…"])
            assert capsys.readouterr().err == "", command
        elif command[0] == "make":
            targets = [word for word in command[1:] if "=" not in word]
            assert set(targets) <= set(MAKE), command
        elif command[0] == "python":
            name = command[2] if command[1] == "-m" else command[1]
            known = importlib.util.find_spec(name) if command[1] == "-m" else (ROOT / name).exists()
            assert known, command
        else:
            assert command[0] in ("pip", "torchrun", "cd", "git"), command


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_commands_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in TEXTS:
        Path(text).write_text("\n".join(20 * LINES))
    for block in blocks(PAGES[name], *SHELLS):
        for command in commands(block.code) if not block.reason else ():
            arguments = of_fastqt(command)
            assert arguments is not None, (
                f"{command}: want a command of fastqt, or a comment on why it is not run"
            )
            assert main(arguments) == 0, command


@pytest.mark.parametrize("name", PAGES)
def test_reasons_stand_above_blocks(name):
    """A comment that is not directly above a block would have no effect."""
    text = PAGES[name].read_text()
    reasons = [block.reason for block in blocks(PAGES[name], "python", *SHELLS) if block.reason]
    assert len(reasons) == text.count("<!-- not run: ")
    assert all(len(reason) > 10 for reason in reasons)


def test_links_lead_to_files_and_headings():
    """On GitHub too, where pages are read as they are."""
    for name, path in {"README.md": ROOT / "README.md", **PAGES}.items():
        text = re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
            found = (path.parent / target).resolve() if target else path
            assert found.exists(), f"{name}: {target}"
            if anchor and found.suffix == ".md":
                assert anchor in headings(found), f"{name}: {target}#{anchor}"


def test_pages_are_found():
    assert {"index.md", "quick-start.md", "concepts.md", "kernels.md", "losses.md"} <= set(PAGES)
    assert len(PAGES) == len([path for path in DOCS.rglob("*.md") if "_" not in path.parent.name])
