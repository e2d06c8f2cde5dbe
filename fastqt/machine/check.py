"""The check of a machine: whether fastqt's losses are right on its devices, and how fast they are there."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from fastqt._version import __version__
from fastqt.compiling import compile_ahead
from fastqt.devices import AMD
from fastqt.engines import report
from fastqt.errors import InputError
from fastqt.machine import times
from fastqt.machine.cases import CASES, QUICK_CASES
from fastqt.machine.verdicts import (
    DTYPES,
    Question,
    Truths,
    Verdict,
    answer,
    name_of,
    questions,
    usable_engines,
)

SECONDS = 60.0
FOR_TIMES = 0.2  # the share of the seconds that is left for the table of times
SHOWN = 5  # wrong results of a device that are printed; the file has all
HEADER = (
    f"  {'engine':<10} {'dtype':<9} {'right':>5} {'wrong':>5} {'refused':>7} {'not reached':>11} "
    f"{'error/bound':>12}"
)
NOTHING = "WRONG: nothing was checked on {device}, because {why}"


def run(devices: Sequence[str] = (), *, quick: bool = False, seconds: float = SECONDS) -> dict[str, Any]:
    """Checks devices, prints what is right and what is not, and returns all results, to be stored as JSON.

    Every engine that is usable on a device computes losses and their gradients, in float32, bfloat16 and
    float16 where the device has them, and with both memory modes. They are compared with the formulas in
    float64 on the CPU: an error may be at most `EAGER_FACTOR` times that of eager PyTorch in the same dtype,
    and a floor (`verdicts.floor`).

    Args:
        devices: as torch names them, such as "cuda:1"; by default all of this machine.
        quick: small sizes and times of small losses, in a few seconds.
        seconds: of all devices together. What is not reached in this time is said to be so.

    Returns:
        All results with figures; "right" is False if a result is wrong or nothing was computed on a device.
    """
    if not seconds > 0:
        raise InputError(f"--seconds: want more than 0, got {seconds:g}")
    chosen = list(dict.fromkeys(map(device_of, devices))) or every_device()

    print(f"fastqt {__version__}, torch {report.versions()}, Python {platform.python_version()}")
    end = time.monotonic() + seconds
    checks: list[Verdict] = []
    measured: list[dict[str, Any]] = []
    for number, device in enumerate(chosen):
        begin = time.monotonic()
        share = (end - begin) / (len(chosen) - number)
        checks += check_device(device, quick, begin + share * (1 - FOR_TIMES))
        measured += _measure(device, quick, begin + share)

    faults = [sentence for device in chosen for sentence in _faults(device, checks)]
    print()
    for sentence in faults or [_all_right(checks)]:
        print(sentence)
    return _stored(checks, measured, faults)


def every_device() -> list[torch.device]:
    """The CPU and every accelerator that torch can use here."""
    devices = []
    for device in report.devices():
        count = 1 if device.type == "cpu" else torch.accelerator.device_count()
        devices += [torch.device(device.type, k) if count > 1 else device for k in range(count)]
    return devices


def device_of(name: str) -> torch.device:
    """A device of this machine by its name."""
    there = every_device()
    names = ", ".join(dict.fromkeys(device.type for device in there))
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device: want one of {names}, or one with a number, got {name!r}") from None
    if device.type not in {known.type for known in there}:
        why = f"; {report.why_no_gpu()}" if device.type == "cuda" else ""
        raise InputError(f"--device: want one that torch can use here, {names}, got {name!r}{why}")

    count = 1 if device.type == "cpu" else torch.accelerator.device_count()
    if device.index is not None and device.index >= count:
        raise InputError(f"--device: want a number below {count}, as there are so many, got {name!r}")
    return device if device.type == "cpu" or device.index is not None else torch.device(device.type, 0)


def check_device(device: torch.device, quick: bool, end: float) -> list[Verdict]:
    """Asks all engines of a device, until `time.monotonic()` is `end`, and prints a table of the answers."""
    engines = usable_engines(device)
    print(f"\n{device}: {description(device)}")
    print(HEADER)

    truths, verdicts = Truths(), []
    asked = list(questions(device, engines, QUICK_CASES if quick else CASES, DTYPES))
    for _, of_case in groupby(asked, key=lambda question: question.case.name):
        about = list(of_case)
        if device.type == "cuda" and "triton" in engines and time.monotonic() < end:
            compile_kernels(device, about)
        for question in about:
            if time.monotonic() < end:
                verdicts.append(answer(question, truths))
            else:
                verdicts.append(Verdict(question, "not reached", {}))
            _show_progress(len(verdicts), len(asked))

    for engine in engines:
        for dtype in DTYPES:
            rows = [v for v in verdicts if v.question.engine == engine and v.question.dtype is dtype]
            print(_row(engine, name_of(dtype), rows), flush=True)
    return verdicts


def compile_kernels(device: torch.device, about: Sequence[Question], target: str | None = None) -> int:
    """Compiles the Triton kernels that the answers to some questions launch, and returns how many these are.

    One after the other they would take most of the time of a check on a GPU that has compiled none yet.
    """
    if AMD:  # whose kernels are compiled when they are first launched
        return 0
    of_triton = [question for question in about if question.engine == "triton"]
    on_device = torch.cuda.device(device) if target is None else contextlib.nullcontext()
    with on_device:
        return len(compile_ahead([question.stand_in for question in of_triton], target=target))


def _show_progress(done: int, of_all: int) -> None:
    """How many questions are answered, for who watches."""
    if sys.stderr.isatty():
        end = "\r" if done < of_all else "\r\033[K"
        print(f"  {done} of {of_all} checks" if done < of_all else "", end=end, file=sys.stderr, flush=True)


def description(device: torch.device) -> str:
    """What a device is, in words."""
    if device.type == "cpu":
        return f"{platform.machine()}, {torch.get_num_threads()} threads, {report.simd()}"
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        return f"{about.name}, {about.total_memory >> 20:,} MiB"
    if device.type == "xpu":
        return str(torch.xpu.get_device_name(device))
    return f"torch's devices of the type {device.type}"


def _row(engine: str, dtype: str, verdicts: list[Verdict]) -> str:
    """A line of the table. Its last column is the largest part of its bound that an error is."""
    counts = Counter(verdict.status for verdict in verdicts)
    shares = [error / bound for v in verdicts for error, bound in v.errors.values()]
    share = f"{max(shares):.2f}" if shares else "-"
    return (
        f"  {engine:<10} {dtype:<9} {counts['right']:>5} {counts['wrong']:>5} {counts['refused']:>7} "
        f"{counts['not reached']:>11} {share:>12}"
    )


def _measure(device: torch.device, quick: bool, end: float) -> list[dict[str, Any]]:
    """Prints the table of times of a device, and returns its rows."""
    measurements = times.measure(device, quick, end)
    first = measurements[0]
    print(
        f"  times: value and gradients, {first.N:,} rows of width {first.D:,}, {first.dtype}; "
        "MiB: peak above inputs and gradients"
    )
    for line in times.lines(measurements):
        print(line, flush=True)
    return [{"device": str(device), **dataclasses.asdict(m)} for m in measurements]


def _faults(device: torch.device, verdicts: list[Verdict]) -> list[str]:
    """What is wrong on a device, in sentences; nothing where all is right."""
    answers = [v for v in verdicts if v.question.device == device]
    wrong = [v for v in answers if v.status == "wrong"]
    if not wrong:
        if any(v.status == "right" for v in answers):
            return []
        refusals = [v.message for v in answers if v.status == "refused"]
        why = refusals[0] if refusals else "the time was over; --seconds gives more"
        return [NOTHING.format(device=device, why=why)]

    engines = ", ".join(dict.fromkeys(v.question.engine for v in wrong))
    sentences = [
        f"WRONG: on {device}, {len(wrong)} of {len(answers)} checks failed, of the engines: {engines}."
    ]
    sentences += [f"  {v.question.engine}: {v.question}: {_reason(v)}" for v in wrong[:SHOWN]]
    if len(wrong) > SHOWN:
        sentences.append(f"  and {len(wrong) - SHOWN} more, which --json FILE stores")
    sentences.append(
        "  Do not train with them: the environment variable FASTQT_BACKEND=reference computes all losses in "
        "plain PyTorch.\n  Please report the file of --json with the output of fastqt config."
    )
    return sentences


def _reason(verdict: Verdict) -> str:
    if verdict.worst is None:
        return verdict.message
    name, error, bound = verdict.worst
    what = "the loss" if name == "loss" else f"the gradient of {name}"
    return f"{what} has an error of {error:.3g}, and may have {bound:.3g}"


def _all_right(verdicts: list[Verdict]) -> str:
    counts = Counter(verdict.status for verdict in verdicts)
    sentence = f"Nothing is wrong: {counts['right']} checks passed."
    if late := counts["not reached"]:
        sentence += f" {late} were not reached in this time; --seconds gives them more."
    return sentence


def _stored(checks: list[Verdict], measured: list[dict[str, Any]], faults: list[str]) -> dict[str, Any]:
    """What the file holds. JSON has no NaN, so an error that is none is null."""
    return {
        "fastqt": __version__,
        "torch": report.versions(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "devices": {str(d): description(d) for d in dict.fromkeys(v.question.device for v in checks)},
        "right": not faults,
        "faults": faults,
        "checks": [_stored_verdict(v) for v in checks],
        "times": measured,
    }


def _stored_verdict(v: Verdict) -> dict[str, Any]:
    errors = {
        name: {"error": error if math.isfinite(error) else None, "bound": bound}
        for name, (error, bound) in v.errors.items()
    }

    return {
        "device": str(v.question.device),
        "engine": v.question.engine,
        "case": v.question.case.name,
        "sizes": {name: getattr(v.question.case, name) for name in "NMKD"},
        "dtype": name_of(v.question.dtype),
        "memory": v.question.memory,
        "reduction": v.question.reduction,
        "status": v.status,
        "message": v.message,
        "errors": errors,
    }
