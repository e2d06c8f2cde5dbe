"""open_clip's own tests with fastqt's losses in the place of theirs.

python tests/peers/open_clip.py CHECKOUT [--keep EXPRESSION]

Runs the tests of a checkout of mlfoundations/open_clip twice, with its losses and with those of
`fastqt.integrations.open_clip`, and prints a JSON object: how many passed, failed and were skipped before and
after, how many reach a loss, and which passed before and do not after; if there is one, the exit status is 1.
open_clip needs torchvision, timm and ftfy, and some tests webdataset; PYTHONPATH may name a folder with them
(pip install --no-deps --target FOLDER ...). A torchvision that was built for another torch is enough, as
images are only resized.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

# This file has the name of the package that it tests.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

import pytest  # noqa: E402

# What passes before and is not meant to pass after, with the reason.
NOT_EXPRESSIBLE: dict[str, str] = {}
LOSSES = ("ClipLoss", "SigLipLoss")


class Outcomes:
    """A plugin of pytest that notes what becomes of each test, and which of them compute a loss."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.reached: set[str] = set()
        self.current = ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.current = nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.found[report.nodeid] = report.outcome

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.found[report.nodeid] = f"{report.outcome} to import"

    def watch(self, loss: type) -> None:
        """Notes the tests that call a method of this loss."""
        for name in ("forward", "_loss", "get_logits"):
            method = getattr(loss, name, None)
            if method is not None:
                setattr(loss, name, self._noting(method))

    def _noting(self, method: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            self.reached.add(self.current)
            return method(*args, **options)

        return noted


def allow_other_torchvision() -> None:
    """Declares the operators of torchvision that its Python part wants, and that no test calls."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    allow_other_torchvision.library = library  # type: ignore[attr-defined]  # or it would be undone


def put_in_place() -> None:
    """Replaces open_clip's losses wherever its modules name them, and as the bases of its other losses."""
    import open_clip.loss as theirs

    import fastqt.integrations.open_clip as ours

    modules = [module for name, module in sys.modules.items() if name.startswith("open_clip")]
    for name in LOSSES:
        before, after = getattr(theirs, name), getattr(ours, name)
        for module in modules:
            if getattr(module, name, None) is before:
                setattr(module, name, after)
        for other in list(before.__subclasses__()):
            other.__bases__ = (after,)


def tests_of(checkout: Path, ours: bool, answer: Path, keep: str) -> None:
    """Runs the tests in this process, and writes what became of them."""
    allow_other_torchvision()
    sys.path.insert(0, str(checkout / "src"))
    import open_clip.loss

    outcomes = Outcomes()
    if ours:
        put_in_place()
    for name in LOSSES:
        outcomes.watch(getattr(open_clip.loss, name))
    options = ["-q", "-k", keep, "--continue-on-collection-errors", "--rootdir", str(checkout)]
    without = [f"-pno:{plugin}" for plugin in ("cacheprovider", "benchmark", "xdist")]
    pytest.main([*options, *without, str(checkout / "tests")], plugins=[outcomes])
    answer.write_text(json.dumps({"found": outcomes.found, "reached": sorted(outcomes.reached)}))


def outcomes_of(checkout: Path, way: str, keep: str) -> dict[str, Any]:
    """What a process of its own finds, without a network."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as directory:
        answer = Path(directory, "answer.json")
        options = ["--run", way, "--answer", str(answer), "--keep", keep]
        command = [sys.executable, __file__, str(checkout), *options]
        subprocess.run(command, cwd=directory, env=environment, stdout=sys.stderr, check=False)
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--keep", default="", help="as pytest's -k")
    parser.add_argument("--run", choices=["theirs", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    checkout = given.checkout.resolve()
    if given.run:
        tests_of(checkout, given.run == "ours", given.answer, given.keep)
        return 0
    before, after = (outcomes_of(checkout, way, given.keep) for way in ("theirs", "ours"))
    passed = [name for name, outcome in before["found"].items() if outcome == "passed"]
    lost = [name for name in passed if after["found"].get(name) != "passed"]
    report = {
        "before": dict(Counter(before["found"].values())),
        "after": dict(Counter(after["found"].values())),
        "reach a loss": {"before": len(before["reached"]), "after": len(after["reached"])},
        "reach a loss and pass": len(set(after["reached"]) & set(passed) - set(lost)),
        "lost": [name for name in lost if name not in NOT_EXPRESSIBLE],
        "not expressible": {name: NOT_EXPRESSIBLE[name] for name in lost if name in NOT_EXPRESSIBLE},
    }
    print(json.dumps(report, indent=2))
    return 1 if report["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
