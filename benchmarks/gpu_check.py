"""All that a GPU's owner wants to know in one go, in under 8 minutes: is it right there, and how fast.

python -m benchmarks.gpu_check                        # prints a table, stores benchmarks/results/gpu/*.json
python -m benchmarks.gpu_check --quick --out run.json
python -m benchmarks.gpu_check --dry-run --out run.json   # on a CPU: tiny shapes, Triton's interpreter

Each section runs in a process of its own with a budget of time and hands over what it finds line by line, so
that a kernel that hangs or breaks the device costs no more than its own section. Exits with 1 if a check
failed or a section did.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastqt
from benchmarks import peers

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"  # beside the CPU's, which the README renders
GRACE = 5.0  # seconds between a section's end of time and its own end
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MEMORY = ("fast", "low")
EAGER_FACTOR = 1.5  # no error may be over this multiple of eager PyTorch's in the same dtype
SANITIZER_ERROR = 86  # the exit status that compute-sanitizer is asked for

Record = dict[str, Any]  # of one thing found; "kind" says what
Verdict = tuple[bool, str]  # and what it rests on


@dataclass(frozen=True)
class Options:
    quick: bool = False
    dry_run: bool = False

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.dry_run else torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True)
class Section:
    """Something to find out: within `seconds`, after which no further record is asked for."""

    name: str
    seconds: float
    records: Callable[[Options], Iterator[Record]]


class NotTakenError(Exception):
    """The engine says that a case is not its own."""


def check(name: str, test: Callable[[], Verdict]) -> Record:
    """Whether a test holds; None where it does not apply."""
    try:
        ok, detail = test()
    except NotTakenError as reason:
        ok, detail = None, str(reason)
    except Exception as error:
        ok, detail = False, _words(error)
    return {"kind": "check", "name": name, "ok": ok, "detail": detail}


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The machine


def machine(options: Options) -> Iterator[Record]:
    import triton

    device = options.device
    on_gpu = device.type == "cuda"
    yield {
        "kind": "machine",
        "device": torch.cuda.get_device_name(device) if on_gpu else "interpreter",
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else None,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "fastqt": fastqt.__version__,
        "date": datetime.date.today().isoformat(),
    }


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=GRACE)
    return said.stdout.splitlines()[0].strip() if said.returncode == 0 and said.stdout else None


# Is it right: small cases against the tests' oracle


def cases(options: Options, dtype: torch.dtype, memory: str) -> Iterator[Record]:
    """Every case of the tests, by its mean and under an upstream gradient a row."""
    shared = _tests()
    chosen = shared.CASES[:: 10 if options.dry_run else 5 if options.quick else 1]
    for case in chosen:
        for reduction in ("mean", "none"):
            test = partial(_case, case, dtype, memory, reduction, options.device)
            yield check(f"{case.name}, {reduction}", test)


def _tests() -> Any:
    """The tests' shared cases, which are no package."""
    folder = str(ROOT / "tests")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import cases

    return cases


def _case(case: Any, dtype: torch.dtype, memory: str, reduction: str, device: torch.device) -> Verdict:
    from tolerances import FLOAT32, relative

    inputs = case.inputs(dtype)
    there = {name: x.detach().to(device).requires_grad_() for name, x in inputs.items()}
    arguments = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in case.arguments.items()}
    loss = _taken(**there, **arguments, reduction=reduction, memory=memory)
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(loss.shape, generator=generator)
    weights = upstream.double().numpy() if reduction == "none" else None
    expected = case.expected(inputs, weights)
    if reduction == "mean":
        upstream = torch.ones(())
    gradients = torch.autograd.grad(loss, list(there.values()), upstream.to(loss))
    # The loss sums float32; E, the weighted rows and the gradient itself are each rounded to the dtype.
    rounding = 0.0 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    exact = expected.loss if reduction == "none" else expected.loss.mean()
    bounds = {"loss": (relative(loss.cpu(), exact), FLOAT32)}
    for name, gradient in zip(there, gradients, strict=True):
        bounds[name] = relative(gradient.cpu(), getattr(expected, name)), FLOAT32 + rounding
    return _within(bounds)


def _taken(*args: Any, **options: Any) -> Tensor:
    try:
        return fastqt.contrastive_loss(*args, **options, backend="triton")
    except ValueError as error:
        if str(error).startswith("backend:"):
            raise NotTakenError(str(error)) from error
        raise


def _within(bounds: Mapping[str, tuple[float, float]]) -> Verdict:
    """Whether each error is within its bound; NaN is not."""
    ok = all(error <= bound for error, bound in bounds.values())
    return ok, ", ".join(
        f"{name} {error:.2g} (at most {bound:.2g})" for name, (error, bound) in bounds.items()
    )


# Is it right: larger problems against float64 on the device, and no worse than eager PyTorch


@dataclass(frozen=True)
class Problem:
    name: str
    kind: str  # of INPUTS
    N: int
    M: int
    D: int
    offsets: tuple[int, ...]  # the targets of row i are candidates i + offset
    diagonal: str
    seeds: int = 3


PROBLEMS = (
    Problem("window", "random", 1021, 1021, 253, (-1, 1), "zero"),
    Problem("more candidates", "random", 515, 1337, 65, (0,), "keep"),
    Problem("fewer candidates", "random", 777, 130, 96, (0,), "keep"),
    Problem("converged, diagonal", "converged", 1024, 1024, 256, (0,), "keep"),
    Problem("converged, next", "converged", 1023, 1023, 256, (1,), "zero"),
    Problem("overflow, nothing sampled", "overflow", 700, 700, 256, (0,), "keep"),
    Problem("overflow, sampled", "overflow", 1500, 5000, 256, (0,), "keep"),
    Problem("many chunks", "random", 16500, 18000, 64, (1,), "zero", seeds=1),
)
QUICK_PROBLEMS = (PROBLEMS[0], PROBLEMS[3], PROBLEMS[6])
DRY_PROBLEMS = (
    Problem("window", "random", 13, 13, 11, (-1, 1), "zero", seeds=2),
    Problem("overflow", "overflow", 11, 17, 24, (0,), "keep", seeds=2),
)


def accuracy(options: Options, dtype: torch.dtype, memory: str) -> Iterator[Record]:
    problems = QUICK_PROBLEMS if options.quick else PROBLEMS
    for problem in DRY_PROBLEMS if options.dry_run else problems:
        yield check(problem.name, partial(_accuracy, problem, dtype, memory, options.device))


def _accuracy(problem: Problem, dtype: torch.dtype, memory: str, device: torch.device) -> Verdict:
    ours: list[list[float]] = []
    eagers: list[list[float]] = []
    for seed in range(problem.seeds):
        f, g = (x.to(device, dtype).requires_grad_() for x in INPUTS[problem.kind](problem, seed))
        exact = truth(f.detach(), g.detach(), problem.offsets, problem.diagonal)
        _assert_kind(problem, exact[0])
        options = {"diagonal": problem.diagonal, "memory": memory}
        targets = fastqt.Window(offsets=list(problem.offsets))
        rows = _taken(f, g, targets, **options, reduction="none")
        mean = torch.autograd.grad(_taken(f, g, targets, **options), (f, g))
        ours.append(_errors((rows.detach(), *mean), exact))
        rows = eager_rows(f, g, problem.offsets, problem.diagonal)
        eagers.append(_errors((rows.detach(), *torch.autograd.grad(rows.mean(), (f, g))), exact))
    # Eager may happen to round to the truth; half a unit in the last place of a result is always allowed.
    slack = (torch.finfo(torch.float32).eps / 2, *(torch.finfo(dtype).eps / 2,) * 2)
    names = ("loss", "queries", "candidates")
    bounds = {}
    for k, name in enumerate(names):
        bound = EAGER_FACTOR * sum(e[k] for e in eagers) / len(eagers) + slack[k]
        bounds[name] = sum(e[k] for e in ours) / len(ours), bound
    return _within(bounds)


def random_inputs(p: Problem, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, p.D, generator=generator) / p.D**0.25 for rows in (p.N, p.M))


def converged_inputs(p: Problem, seed: int) -> tuple[Tensor, Tensor]:
    """Rows that score 24 with their one target and little with all others."""
    queries, candidates = random_inputs(p, seed)
    candidates /= candidates.norm(dim=1, keepdim=True)
    row = torch.arange(p.N)
    has = (row + p.offsets[0] >= 0) & (row + p.offsets[0] < p.M)
    queries[has] = 24 * candidates[row[has] + p.offsets[0]]
    return queries, candidates


def overflowing_inputs(p: Problem, seed: int) -> tuple[Tensor, Tensor]:
    """Every third row scores 200 with a candidate that is no target of any such row."""
    queries, candidates = random_inputs(p, seed)
    loud = torch.arange(0, p.N, 3)
    others = torch.randperm(p.M, generator=torch.Generator().manual_seed(seed))
    others = others[others % 3 != 0][: len(loud)]
    loud = loud[: len(others)]
    candidates[others] = 200 * queries[loud] / (queries[loud] ** 2).sum(1, keepdim=True)
    return queries, candidates


INPUTS = {"random": random_inputs, "converged": converged_inputs, "overflow": overflowing_inputs}


def _assert_kind(problem: Problem, losses: Tensor) -> None:
    """The inputs are as hard as they are meant to be."""
    if problem.kind == "converged" and losses.max() > 1e-3:
        raise AssertionError(f"inputs are not converged: p = {math.exp(-losses.max()):.4f}")
    if problem.kind == "overflow" and (losses > 100).sum() < problem.N // 5:
        raise AssertionError("inputs overflow too few rows")


def _errors(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def target_matrix(rows: Tensor, M: int, offsets: tuple[int, ...]) -> Tensor:
    """Those rows of T, (len(rows), M) float64, each divided by its sum."""
    T = torch.zeros(len(rows), M, dtype=torch.float64, device=rows.device)
    for offset in offsets:
        column = rows + offset
        inside = (column >= 0) & (column < M)
        T[inside.nonzero().squeeze(1), column[inside]] = 1.0
    return T / T.sum(1, keepdim=True).clamp(min=1)


def truth(
    queries: Tensor, candidates: Tensor, offsets: tuple[int, ...], diagonal: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows' losses, and the gradients of their mean: float64, by the formulas, some rows at a time."""
    F, G = queries.double(), candidates.double()
    N, M = len(F), len(G)
    losses, dF, dG = F.new_empty(N), torch.empty_like(F), torch.zeros_like(G)
    for rows in torch.arange(N, device=F.device).split(2048):
        T = target_matrix(rows, M, offsets)
        S = F[rows] @ G.T
        own = rows[:, None] == torch.arange(M, device=F.device) if diagonal == "zero" else None
        if own is not None:
            S.masked_fill_(own, 0)
        log_P = S.log_softmax(1)
        losses[rows] = (torch.special.xlogy(T, T) - T * log_P).sum(1)
        dS = (T.sum(1, keepdim=True) * log_P.exp() - T) / N
        if own is not None:
            dS.masked_fill_(own, 0)
        dF[rows] = dS @ G
        dG += dS.T @ F[rows]
    return losses, dF, dG


def eager_rows(f: Tensor, g: Tensor, offsets: tuple[int, ...], diagonal: str) -> Tensor:
    """The rows' losses as one would write them, in the inputs' dtype."""
    T = target_matrix(torch.arange(len(f), device=f.device), len(g), offsets).to(f.dtype)
    scores = f @ g.T
    if diagonal == "zero":
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu().tril(), 0)
    return torch.nn.functional.kl_div(scores.log_softmax(1), T, reduction="none").sum(1)


# Does it behave: streams, graphs, waits, repeated runs


def behaviour(options: Options) -> Iterator[Record]:
    device = options.device
    dtype = torch.float16 if options.dry_run else torch.bfloat16
    N, D = (9, 8) if options.dry_run else (4000, 128)
    for memory in MEMORY:
        problem = partial(_behaviour_step, N, D, dtype, device, memory)
        yield check(f"two runs are equal, {memory}", partial(_repeats, problem))
        yield check(f"NaN stays in its row, {memory}", partial(_nan, N, D, dtype, device, memory))
        if device.type == "cuda":
            yield check(f"a CUDA graph equals the plain call, {memory}", partial(_graph, problem))
            yield check(f"another stream is respected, {memory}", partial(_stream, problem))
    if device.type == "cuda":
        for name, arguments in _waitless(device):
            yield check(f"nothing waits for the device: {name}", partial(_no_wait, arguments, device))


def _behaviour_step(
    N: int, D: int, dtype: torch.dtype, device: torch.device, memory: str
) -> tuple[list[Tensor], Callable[[], list[Tensor]], list[Tensor]]:
    """Leaves, forward and backward on them, and other values for them."""
    generator = torch.Generator().manual_seed(0)
    first, second = (
        [(torch.randn(N, D, generator=generator) / D**0.25).to(device, dtype) for _ in range(2)]
        for _ in range(2)
    )
    leaves = [x.requires_grad_() for x in first]

    def step() -> list[Tensor]:
        loss = fastqt.contrastive_loss(*leaves, memory=memory, backend="triton")
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    return leaves, step, second


def _equal(a: list[Tensor], b: list[Tensor]) -> Verdict:
    differ = [name for name, x, y in zip(("loss", "dF", "dG"), a, b, strict=True) if not torch.equal(x, y)]
    return not differ, f"differ: {', '.join(differ)}" if differ else "bitwise"


def _repeats(problem: Callable[[], Any]) -> Verdict:
    _, step, _ = problem()
    return _equal(step(), step())


def _nan(N: int, D: int, dtype: torch.dtype, device: torch.device, memory: str) -> Verdict:
    """A NaN among the queries reaches its own row's loss and gradient, and no other's."""
    (f, g), _, _ = _behaviour_step(N, D, dtype, device, memory)
    with torch.no_grad():
        f[7, 2] = math.nan
    rows = fastqt.contrastive_loss(f, g, reduction="none", memory=memory, backend="triton")
    others = torch.arange(N, device=device) != 7
    (dF,) = torch.autograd.grad(rows.sum(), f)
    ok = bool(rows[7].isnan() & rows[others].isfinite().all() & dF[others].isfinite().all())
    return ok, f"row 7 has {float(rows[7])}, {int((~rows[others].isfinite()).sum())} others are not finite"


def _graph(problem: Callable[[], Any]) -> Verdict:
    leaves, step, fresh = problem()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf, values in zip(leaves, fresh, strict=True):
            leaf.copy_(values)
    graph.replay()
    torch.cuda.synchronize()
    return _equal(captured, step())


def _stream(problem: Callable[[], Any]) -> Verdict:
    """On a stream that is long busy before the inputs are there: work elsewhere would find other values."""
    leaves, step, fresh = problem()
    step()
    busy = torch.randn(4096, 4096, device=leaves[0].device)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(20):
            busy = busy @ busy
            busy /= busy.norm()
        for leaf, values in zip(leaves, fresh, strict=True):
            leaf.copy_(values)
        with torch.enable_grad():
            found = step()
    torch.cuda.synchronize()
    return _equal(found, step())


def _waitless(device: torch.device) -> list[tuple[str, dict[str, Any]]]:
    N = 40_000  # too many for a window's targets to be kept from the last call
    ids = torch.arange(N, device=device)
    return [
        ("small", {"N": 400}),
        ("large", {"N": N}),
        ("documents", {"N": N, "document_ids": ids // 50}),
        ("class indices", {"N": N, "targets": ids, "diagonal": "keep"}),
        ("a learnt scale", {"N": 400, "scale": torch.tensor(2.0, device=device, requires_grad=True)}),
        ("normalised", {"N": 400, "normalize": True, "scale": 20.0}),
        ("rows", {"N": 400, "reduction": "none"}),
        ("low memory", {"N": N, "memory": "low"}),
    ]


def _no_wait(arguments: dict[str, Any], device: torch.device) -> Verdict:
    arguments = dict(arguments)
    N = arguments.pop("N")
    leaves = [
        torch.randn(N, 64, device=device, dtype=torch.bfloat16).mul_(0.3).requires_grad_() for _ in range(2)
    ]
    scale = arguments.get("scale")
    wanted = [*leaves, scale] if isinstance(scale, Tensor) else leaves

    def step() -> None:
        loss = fastqt.contrastive_loss(*leaves, **arguments, backend="triton")
        torch.autograd.grad(loss, wanted, torch.ones_like(loss))

    step()  # what is compiled and allocated the first time may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True, "forward and backward"


# Does it touch only what is its own


def sanitized(options: Options) -> Iterator[Record]:
    """Small calls that reach every kernel: to be run under a tool that watches memory."""
    shared = _tests()
    names = ("all at once", "smoothed window")
    problem = Problem("overflow", "overflow", 150, 333, 72, (0,), "keep", seeds=1)
    for memory in MEMORY:
        for case in (c for c in shared.CASES if c.name in names):
            test = partial(_case, case, torch.bfloat16, memory, "mean", options.device)
            yield check(f"{case.name}, {memory}", test)
        yield check(
            f"overflow, {memory}", partial(_accuracy, problem, torch.bfloat16, memory, options.device)
        )


def sanitizer(options: Options) -> Iterator[Record]:
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        reason = "compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin"
        yield {"kind": "check", "name": "compute-sanitizer", "ok": None, "detail": reason}
        return
    plain = run_section(find_section("sanitized", options), options)
    yield from plain.records
    # torch's cache of allocations would hide where one tensor ends and the next begins.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for name, more in (("memcheck", ()), ("racecheck", ("--kernel-name", "kns=_kernel"))):
        prefix = (
            *(tool, "--tool", name, "--error-exitcode", str(SANITIZER_ERROR)),
            *("--target-processes", "application-only", "--report-api-errors", "no", *more),
        )
        outcome = run_section(find_section("sanitized", options), options, prefix, environment)
        yield {"kind": "check", "name": name, **asdict(sanitizer_verdict(outcome.exit_code, outcome.output))}


@dataclass(frozen=True)
class SanitizerVerdict:
    ok: bool | None
    detail: str


def sanitizer_verdict(exit_code: int | None, output: str) -> SanitizerVerdict:
    """What a tool found: its own exit status for errors, and for none a summary that it worked at all."""
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", output)
    tail = "\n".join(output.strip().splitlines()[-12:])
    if exit_code == SANITIZER_ERROR:
        return SanitizerVerdict(False, tail)
    if exit_code == 0 and summaries:
        clean = re.search(r"SUMMARY: 0 (?:errors|hazards)", summaries[-1]) is not None
        return SanitizerVerdict(clean, summaries[-1])
    return SanitizerVerdict(None, f"could not tell (exit status {exit_code}): {tail}")


# Sections, each in a process of its own


def waves(options: Options) -> list[list[Section]]:
    """Sections that may share the device, wave by wave; those that take times have it to themselves."""
    combinations = [(dtype, memory) for dtype in DTYPES for memory in MEMORY]
    if options.quick:
        combinations = [(torch.bfloat16, memory) for memory in MEMORY]
    checks = [
        Section(f"{name}, {_name(dtype)}, {memory}", 160, partial(run, dtype=dtype, memory=memory))
        for name, run in (("cases", cases), ("accuracy", accuracy))
        for dtype, memory in combinations
    ]
    if options.dry_run:
        checks = [checks[0], checks[-1]]
    return [
        [Section("machine", 20, machine)],
        [*checks, Section("behaviour", 160, behaviour), Section("sanitizer", 195, sanitizer)],
        [Section("benchmark", 80, partial(benchmark, contestants=peers.fused_and_eager))],
        [Section("graphs", 20, partial(benchmark, contestants=peers.fused_and_eager, graphed=True))],
        [Section("peers", 60, partial(benchmark, contestants=lambda shape: peers.PEERS))],
        [Section("compiled", 50, partial(benchmark, contestants=compiled, smallest_first=True))],
    ]


def compiled(shape: peers.Shape) -> Mapping[str, peers.Contestant]:
    """Alone, and from small to large: it takes its time before the first step."""
    return {"compiled": peers.compiled}


def benchmark(
    options: Options,
    contestants: Callable[[peers.Shape], Mapping[str, peers.Contestant]],
    graphed: bool = False,
    smallest_first: bool = False,
) -> Iterator[Record]:
    shapes = peers.DRY_SHAPES if options.dry_run else peers.QUICK_SHAPES if options.quick else peers.SHAPES
    effort = peers.DRY_EFFORT if options.dry_run else peers.EFFORT
    dtype = torch.float16 if options.dry_run else torch.bfloat16
    for shape in sorted(shapes, key=lambda s: s.N * s.M * s.D) if smallest_first else shapes:
        if shape.N <= peers.LARGEST_GRAPHED or not graphed:
            for row in peers.measure(shape, contestants(shape), dtype, options.device, effort, graphed):
                yield {"kind": "benchmark", **row}


def find_section(name: str, options: Options) -> Section:
    within = Section("sanitized", 55, sanitized)  # of the sanitizer's own, which runs it three times
    return next(s for wave in [*waves(options), [within]] for s in wave if s.name == name)


@dataclass
class Outcome:
    """What a section found, and how it ended."""

    name: str
    status: str = "done"  # or "out of time", or "failed"
    message: str = ""
    seconds: float = 0.0
    records: list[Record] = field(default_factory=list)
    exit_code: int | None = None
    output: str = ""


def write_lines(section: Section, options: Options, lines: Path) -> int:
    """Runs a section in this process, and writes each record as soon as it is there."""
    end = time.monotonic() + section.seconds
    with lines.open("w") as file:

        def write(record: Record) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        try:
            for record in section.records(options):
                write(record)
                if time.monotonic() > end:
                    write({"kind": "end", "status": "out of time", "message": f"after {section.seconds:g} s"})
                    return 0
        except Exception as error:
            write({"kind": "end", "status": "failed", "message": _words(error)})
            raise
        write({"kind": "end", "status": "done", "message": ""})
    return 0


def run_section(
    section: Section,
    options: Options,
    prefix: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Runs a section in another process, and reads what it found even if it does not come to an end."""
    outcome, begin = Outcome(section.name), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        command = [*prefix, sys.executable, "-m", "benchmarks.gpu_check", "--section", section.name]
        command += ["--lines", str(lines)]
        command += [f"--{name.replace('_', '-')}" for name, on in asdict(options).items() if on]
        variables = {**os.environ, **(environment or {})}
        if options.dry_run:
            variables["TRITON_INTERPRET"] = "1"
        try:
            process = subprocess.run(
                command,
                cwd=ROOT,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=section.seconds + GRACE,
            )
            outcome.exit_code, outcome.output = process.returncode, process.stdout
        except subprocess.TimeoutExpired as expired:
            outcome.output = (expired.stdout or b"").decode(errors="replace")
            outcome.status, outcome.message = "failed", f"did not end within {expired.timeout:g} s"
        found = read_lines(lines)
    ends = [record for record in found if record["kind"] == "end"]
    outcome.records = [record for record in found if record["kind"] != "end"]
    if ends:
        outcome.status, outcome.message = ends[-1]["status"], ends[-1]["message"]
    elif outcome.status == "done":
        last = outcome.output.strip().splitlines()[-1:] or ["no output"]
        outcome.status, outcome.message = "failed", f"exit status {outcome.exit_code}: {last[0]}"
    outcome.seconds = time.monotonic() - begin
    return outcome


def read_lines(path: Path) -> list[Record]:
    """Whole lines; the last may be cut where a process was killed."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


# The report


class Report:
    """What all sections found, as it is stored."""

    def __init__(self, options: Options, path: Path | None) -> None:
        self.path = path
        self.content: dict[str, Any] = {
            "options": asdict(options),
            "machine": None,
            "sections": [],
            "checks": [],
            "benchmarks": [],
        }

    def add(self, outcome: Outcome) -> None:
        content = self.content
        content["sections"].append(
            {
                "name": outcome.name,
                "status": outcome.status,
                "message": outcome.message,
                "seconds": round(outcome.seconds, 1),
            }
        )
        for record in outcome.records:
            kind, entry = record["kind"], {k: v for k, v in record.items() if k != "kind"}
            if kind == "machine":
                content["machine"] = entry
            else:
                content[f"{kind}s"].append({"section": outcome.name, **entry})
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(content, indent=1) + "\n")

    @property
    def failures(self) -> list[str]:
        content = self.content
        failed = [
            f"{c['section']}: {c['name']}: {c['detail']}" for c in content["checks"] if c["ok"] is False
        ]
        ended = [f"{s['name']}: {s['message']}" for s in content["sections"] if s["status"] == "failed"]
        return failed + ended

    def text(self) -> str:
        content = self.content
        lines = [f"{name:<13} {value}" for name, value in (content["machine"] or {}).items()]
        lines += [
            "",
            *columns(("section", "seconds", "passed", "failed", "not told", "end"), self._sections()),
        ]
        lines += ["", *columns(peers.HEADER, map(peers.cells, content["benchmarks"]))]
        failures = self.failures
        lines += ["", f"{len(failures)} failed" if failures else "nothing failed", *failures]
        return "\n".join(lines)

    def _sections(self) -> Iterator[tuple[str, ...]]:
        for section in self.content["sections"]:
            verdicts = [c["ok"] for c in self.content["checks"] if c["section"] == section["name"]]
            counts = (str(sum(v is wanted for v in verdicts)) for wanted in (True, False, None))
            end = f"{section['status']} {section['message']}".strip()
            yield (section["name"], f"{section['seconds']:.0f}", *counts, end[:60])


def columns(header: tuple[str, ...], rows: Any) -> list[str]:
    """Lines of a table: the first two columns to the left, numbers to the right, the last as it is."""
    table = [header, *rows]
    widths = [max(len(row[k]) for row in table) for k in range(len(header))]
    last = len(header) - 1

    def line(row: tuple[str, ...]) -> str:
        cells = (
            cell.ljust(widths[k]) if k < 2 or k == last else cell.rjust(widths[k])
            for k, cell in enumerate(row)
        )
        return "  ".join(cells).rstrip()

    return [line(row) for row in table]


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def default_path() -> Path:
    device = slug(torch.cuda.get_device_name())
    return RESULTS / f"{device}-{datetime.date.today().isoformat()}.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, metavar="PATH", help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="bfloat16 alone, fewer cases and shapes")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU, in Triton's interpreter")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    options = Options(given.quick, given.dry_run)
    if given.section is not None:
        return write_lines(find_section(given.section, options), options, given.lines)
    if options.dry_run and given.out is None:
        parser.error("--dry-run wants --out: it measures no GPU whose results were worth keeping")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device is there; --dry-run takes none")
    if find_spec("fastqt.kernels") is None:
        parser.error("fastqt is not installed: pip install --no-build-isolation --editable .")
    report = Report(options, given.out or default_path())
    at_once = len(os.sched_getaffinity(0))
    for wave in waves(options):
        with ThreadPoolExecutor(min(at_once, len(wave))) as pool:
            for future in as_completed(pool.submit(run_section, section, options) for section in wave):
                outcome = future.result()
                print(
                    f"{outcome.name}: {outcome.status} in {outcome.seconds:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
                report.add(outcome)
    print(report.text())
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
