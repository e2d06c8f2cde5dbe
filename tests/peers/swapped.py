"""Runs another library's own tests, as they are and with names of it replaced by fastqt's.

`run` starts pytest in a process of its own, where this module is a plugin that replaces the names before the
tests are imported, and says of each test how it ended and whether it reached what took their place.
`compared` counts. A script of this folder names the library's tests and what replaces what.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SETTINGS = "SWAPPED_SETTINGS"  # the environment variable that tells the plugin what to do

Outcomes = dict[str, dict[str, Any]]  # by test: "outcome", "why" it failed or was skipped, "reached"


def run(
    checkout: Path,
    tests: Sequence[str],
    *,
    swaps: Mapping[str, str] | None = None,
    reached: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    sources: str = ".",
    options: Sequence[str] = (),
    timeout: float = 1800,
) -> Outcomes:
    """How each test of a checkout ends.

    Args:
        checkout: the folder of the library's sources, from which its tests are run.
        tests: files or folders in it, or tests.
        swaps: "module:name" of the library -> "module:name" in its place, also of a module in this folder.
        reached: "module:class.function" or "module:function" of which a test is said to reach them.
        environment: variables that the tests read.
        sources: the folder in the checkout that holds the package.
        options: further arguments of pytest.
        timeout: seconds, for all tests together.

    Raises:
        RuntimeError: pytest ended before it had an outcome of the tests.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "outcomes.json")
        settings = {"swaps": dict(swaps or {}), "reached": list(reached), "results": str(results)}
        Path(folder, "pytest.ini").write_text("[pytest]\n")
        search = [str(checkout / sources), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "swapped",
            "-p",
            "no:cacheprovider",
            "--continue-on-collection-errors",
        ]
        command += ["-c", str(Path(folder, "pytest.ini")), f"--rootdir={checkout}", *options, *tests]
        done = subprocess.run(
            command,
            cwd=checkout,
            env={
                **os.environ,
                **(environment or {}),
                "PYTHONPATH": os.pathsep.join(search),
                "PYTHONDONTWRITEBYTECODE": "1",
                SETTINGS: json.dumps(settings),
            },
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if not results.exists():
            raise RuntimeError(
                f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return json.loads(results.read_text())


def compared(before: Outcomes, after: Outcomes, not_expressible: Mapping[str, str]) -> dict[str, Any]:
    """What the replacement changes.

    Args:
        before, after: of `run` without swaps and with them.
        not_expressible: by test, the reason that it cannot pass; such a test may fail.
    """
    passing = [test for test, how in before.items() if how["outcome"] == "passed"]
    still = [test for test in passing if after.get(test, {}).get("outcome") == "passed"]
    excused = {
        test: not_expressible[test] for test in passing if test not in still and test in not_expressible
    }
    return {
        "before": dict(Counter(how["outcome"] for how in before.values())),
        "after": dict(Counter(how["outcome"] for how in after.values())),
        "passed before and after": len(still),
        "reached": sum(after[test]["reached"] for test in still),
        "not expressible": excused,
        "broken": {
            test: after.get(test, {}).get("why", "not run")
            for test in passing
            if test not in still and test not in excused
        },
    }


class _Recorder:
    """The plugin's state."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.outcomes: Outcomes = {}
        self.running: str | None = None

    def replace_names(self) -> None:
        # First, since a function that is watched is another object.
        for place in self.settings["reached"]:
            module, path = place.split(":")
            owner: Any = import_module(module)
            *classes, name = path.split(".")
            for part in classes:
                owner = getattr(owner, part)
            setattr(owner, name, self._watched(getattr(owner, name)))
        for place, replacement in self.settings["swaps"].items():
            module, name = place.split(":")
            home, new = replacement.split(":")
            setattr(import_module(module), name, getattr(import_module(home), new))

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **options: Any) -> Any:
            if self.running is not None:
                self.of(self.running)["reached"] = True
            return function(*args, **options)

        return watched

    def of(self, test: str) -> dict[str, Any]:
        return self.outcomes.setdefault(test, {"outcome": "passed", "why": "", "reached": False})


_recorder: _Recorder | None = None


def pytest_configure(config: Any) -> None:
    global _recorder
    _recorder = _Recorder(json.loads(os.environ[SETTINGS]))
    _recorder.replace_names()


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    assert _recorder is not None
    _recorder.running = nodeid
    _recorder.of(nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    assert _recorder is not None
    if report.outcome != "passed":
        why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        _recorder.of(report.nodeid).update(outcome=report.outcome, why=why[-1000:])


def pytest_collectreport(report: Any) -> None:
    assert _recorder is not None
    if report.outcome != "passed":
        _recorder.of(report.nodeid).update(outcome=report.outcome, why=str(report.longrepr)[-1000:])


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    assert _recorder is not None
    Path(_recorder.settings["results"]).write_text(json.dumps(_recorder.outcomes))
