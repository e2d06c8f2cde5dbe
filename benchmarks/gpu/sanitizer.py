"""Small calls under NVIDIA's compute-sanitizer, which finds accesses out of bounds and races."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.correctness import Problem, case_verdict, problem_verdict
from benchmarks.gpu.forced import large_test
from benchmarks.gpu.processes import run_section
from benchmarks.gpu.sections import MEMORY, Options, Record, Section, Verdict, check, check_record
from benchmarks.gpu.stages import SANITIZED
from tests.shared.cases import CASES

LARGE_WIDTH = 256  # which fills the stages of the scores' kernel
ERROR_STATUS = 86  # the tool's exit status where it finds an error
ABSENT = "compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin"
# The tools, and what each is given beside that: which kernels it looks at.
TOOLS: dict[str, tuple[str, ...]] = {"memcheck": (), "racecheck": ("--kernel-name", "kns=_kernel")}


def sanitized(options: Options) -> Iterator[Record]:
    """Small calls that reach every kernel, to be run under a tool that watches memory."""
    names = ("all at once", "smoothed window")
    problem = Problem("overflow", "overflow", 150, 333, 72, (0,), "keep", seeds=1)
    for memory in MEMORY:
        for case in (c for c in CASES if c.name in names):
            test = partial(case_verdict, case, torch.bfloat16, memory, "mean", options.device)
            yield check(f"{case.name}, {memory}", test)
        test = partial(problem_verdict, problem, torch.bfloat16, memory, options.device)
        yield check(f"overflow, {memory}", test)

    # They take the longest, and the time may be short.
    yield from large(options)


def large(options: Options) -> Iterator[Record]:
    """The calls that reach the kernels of large problems on Hopper, as small as these can be."""
    yield check("descriptors, fast", large_test(options, "fast", LARGE_WIDTH))


def sanitizer(options: Options, seconds: float) -> Iterator[Record]:
    """The small calls, first without a tool, then under each of the tools, each within so many seconds."""
    section = replace(SANITIZED, seconds=seconds)
    tool = path_of_tool()
    if tool is None:
        yield check_record("compute-sanitizer", Verdict(None, ABSENT))
        return

    alone = run_section(section, options)
    yield from alone.records
    if alone.status != "done":
        yield check_record(
            "the calls alone", Verdict(False if alone.status == "failed" else None, alone.message)
        )

    for name in TOOLS:
        yield watched(tool, name, section, options)


def memcheck_large(options: Options, seconds: float) -> Iterator[Record]:
    """The calls of `large` under the tool that finds accesses out of bounds."""
    tool = path_of_tool()
    if tool is None:
        yield check_record("compute-sanitizer", Verdict(None, ABSENT))
        return
    section = Section("sanitized, large tiles", seconds, "benchmarks.gpu.sanitizer:large")
    yield watched(tool, "memcheck", section, options)


def path_of_tool() -> str | None:
    """Where the tool is."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def watched(tool: str, name: str, section: Section, options: Options) -> Record:
    """What one of the tools finds in a section."""
    prefix = (
        tool,
        "--tool",
        name,
        "--error-exitcode",
        str(ERROR_STATUS),
        "--target-processes",
        "application-only",
        "--report-api-errors",
        "no",
        *TOOLS[name],
    )
    # Without torch's allocator cache each tensor is its own allocation, whose bounds the tool knows.
    outcome = run_section(section, options, prefix, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    return check_record(name, sanitizer_verdict(outcome.exit_code, outcome.output))


def sanitizer_verdict(exit_code: int | None, output: str) -> Verdict:
    """Fails on the tool's error status; passes only with a summary, which shows that the tool worked."""
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", output)
    tail = "\n".join(output.strip().splitlines()[-12:])
    if exit_code == ERROR_STATUS:
        return Verdict(False, tail)
    if exit_code == 0 and summaries:
        clean = re.search(r"SUMMARY: 0 (?:errors|hazards)", summaries[-1]) is not None
        return Verdict(clean, summaries[-1])
    return Verdict(None, f"could not tell (exit status {exit_code}): {tail}")
