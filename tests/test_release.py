"""What distributes the package: its commands exist, and what is listed twice is the same in both places."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastqt._version import __version__
from tests.test_packaging import copy_sources

tomllib = pytest.importorskip("tomllib", reason="Python has it since 3.11")
yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
RECIPE = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def steps() -> list[dict]:
    return [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]


def test_the_commands_of_the_workflow_exist():
    commands = [step["run"].split() for step in steps() if "run" in step]
    assert ["make", "test", "TORCH='${{", "matrix.torch", "}}'"] in commands
    for program, argument, *_ in commands:
        if program == "make":
            assert argument in TARGETS
        elif program == "fastqt":
            subcommand = subprocess.run(
                [sys.executable, "-m", "fastqt", argument, "--help"], capture_output=True, cwd=ROOT
            )
            assert subcommand.returncode == 0
        else:
            assert (program, argument) == ("pip", "install")


def test_cibuildwheel_builds_one_wheel_for_every_python():
    options = PROJECT["tool"]["cibuildwheel"]
    assert options["build"] == "cp310-*"
    for environment in (options["environment"], options["linux"]["environment"]):
        assert environment["FASTQT_REQUIRE_EXTENSION"] == "1"
    # The torch that is built with is the oldest that the package takes.
    (torch,) = [x for x in PROJECT["project"]["dependencies"] if x.startswith("torch>=")]
    assert f"{torch.replace('>=', '==')}.0 " in options["before-build"]
    # What `make wheel` leaves out of the wheel is left out here too.
    excluded = re.findall(r"--exclude '(\S+)'", options["linux"]["repair-wheel-command"])
    assert excluded == re.findall(r"--exclude '(\S+)'", (ROOT / "Makefile").read_text())
    assert {options["linux"][f"manylinux-{arch}-image"] for arch in ("x86_64", "aarch64")} == {
        "manylinux_2_28"
    }


def test_the_recipe_for_conda_has_the_version_and_the_dependencies_of_the_package():
    assert RECIPE["context"]["version"] == __version__
    run = [x["then"] if isinstance(x, dict) else x for x in RECIPE["requirements"]["run"]]
    plain = {re.sub(r";.*", "", x).replace(" ", "") for x in PROJECT["project"]["dependencies"]}
    as_on_conda = {x.replace("torch>=", "pytorch>=") for x in plain} | {
        f"python{PROJECT['project']['requires-python']}"
    }
    assert {x.replace(" ", "") for x in run} == as_on_conda
    built = {x.partition(" ")[0] for x in RECIPE["requirements"]["host"]}
    assert {"setuptools", "pytorch"} <= built
    (script,) = PROJECT["project"]["scripts"].items()
    assert RECIPE["build"]["python"]["entry_points"] == [" = ".join(script)]


@pytest.mark.parametrize("kind", ["none", "a fork", "with pages"])
def test_addresses_of_the_project_are_those_of_who_distributes_it(kind, tmp_path):
    """There are none where nobody has said where the project is."""
    variables = {
        "none": {},
        "a fork": {"FASTQT_URL": "https://example.org/someone/fastqt/"},
        "with pages": {"FASTQT_URL": "https://example.org/x", "FASTQT_DOCS_URL": "https://docs.example.org"},
    }
    done = metadata(tmp_path, variables[kind])
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "source" / "fastqt.egg-info" / "PKG-INFO").read_text()
    addresses = dict(re.findall(r"^Project-URL: (\w+), (\S+)$", text, re.MULTILINE))
    if kind == "none":
        assert addresses == {}
        assert "Home-page" not in text
        return

    root = variables[kind]["FASTQT_URL"].rstrip("/")
    assert addresses["Source"] == root
    assert addresses["Issues"] == f"{root}/issues"
    assert addresses["Documentation"] == variables[kind].get("FASTQT_DOCS_URL", f"{root}/tree/main/docs")


def test_an_address_that_is_none_is_refused(tmp_path):
    done = metadata(tmp_path, {"FASTQT_URL": "someone/fastqt"})
    assert done.returncode != 0
    assert "FASTQT_URL: want an address that begins with https://, got 'someone/fastqt'" in done.stderr


def metadata(folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Writes the metadata of the package in a copy of the sources."""
    source = copy_sources(folder / "source")
    kept = {name: x for name, x in os.environ.items() if not name.startswith("FASTQT_")}
    command = [sys.executable, "setup.py", "-q", "egg_info"]
    environment = {**kept, "FASTQT_PURE": "1", **variables}
    return subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
