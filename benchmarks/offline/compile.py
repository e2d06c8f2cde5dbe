"""The Triton kernels as machine code for GPUs that are not there: what they use of one.

python -m benchmarks.offline.compile                 # compiles what cases.py lists, prints it as JSON
python -m benchmarks.offline.compile --only KEY...   # of these only those that `key` names so
python -m benchmarks.offline.compile --write         # and stores it, after a change of the kernels

A noted launch is compiled as a real one would be: the same argument types, constants and alignments, by
Triton and the ptxas that comes with it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from benchmarks.offline.cache import CompileCache, python_files, store
from benchmarks.offline.cases import CASES, COUNTED
from benchmarks.paths import RESULTS, ROOT
from tests.shared.launches import GPUS, Case, Event, Gpu, Launch, Product, flag_names, noted, specialised

STORED = RESULTS / "compiled.json"

PRODUCTS = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
INSTRUCTIONS = (*PRODUCTS, "cp.async", "ex2.approx", "st.global.v4", "ld.global.b16")
USAGE = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@functools.cache
def cache(arch: int, *, anew: bool = False) -> CompileCache:
    """What was compiled before, or stored unless it is compiled anew.

    It is valid for the sources of all kernels and of this file, and for the versions of the compiler. Which
    launches there are, and with which arguments, constants and options, is not kept but found anew.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    import fastqt.kernels

    settings = {name: x for name, x in os.environ.items() if name.startswith("TRITON_")}
    settings.pop("TRITON_CACHE_DIR", None)  # a new folder each time
    versions = [
        f"Python {sys.version_info.major}.{sys.version_info.minor}",
        triton.__version__,
        make_backend(GPUTarget("cuda", arch, 32)).hash(),
    ]
    sources = python_files(*map(Path, fastqt.kernels.__path__), Path(__file__))
    versions += [f"{name}={x}" for name, x in sorted(settings.items())]
    return CompileCache(sources, versions, stored=None if anew else STORED)


def compiled(launch: Launch, gpu: Gpu, *, disassembled: bool = False, anew: bool = False) -> dict[str, Any]:
    """What a kernel is on a GPU: its registers a thread, bytes of memory, and how often its PTX has what."""
    asked = (launch.kernel.__name__, specialised(launch), sorted(launch.options.items()), disassembled)
    return cache(gpu.arch, anew=anew).get(
        repr(asked), lambda: _compiled(launch, gpu, disassembled=disassembled)
    )


def _compiled(launch: Launch, gpu: Gpu, *, disassembled: bool) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, alignments = specialised(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=alignments)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):  # where Triton shows ptxas -v
        kernel = triton.compile(source, target=GPUTarget("cuda", gpu.arch, 32), options=launch.options)
    usage = USAGE.search(log.getvalue())
    registers = re.search(r"Used (\d+) registers", log.getvalue())
    if usage is None or registers is None:
        raise RuntimeError(f"ptxas said nothing of {launch.kernel.__name__}: {log.getvalue()!r}")
    stack, stores, loads = map(int, usage.groups())
    ptx = kernel.asm["ptx"]
    figures = {
        "registers": int(registers[1]),
        "stack": stack,
        "spills": stores + loads,
        "shared": kernel.metadata.shared,
        "threads": 32 * kernel.metadata.num_warps,
        "instructions": {name: ptx.count(name) for name in INSTRUCTIONS},
    }
    return {**figures, "sass": opcodes(kernel.asm["cubin"]).total()} if disassembled else figures


def opcodes(cubin: bytes) -> Counter[str]:
    """How often a kernel has which instruction, as the disassembler that comes with Triton lists them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        listing = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    predicated = r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?(\w+)[^;]*;"
    return Counter(name for name in re.findall(predicated, listing, flags=re.MULTILINE) if name != "NOP")


@contextlib.contextmanager
def compiler() -> Iterator[None]:
    """Triton compiles, into a folder that goes with it, and shows what ptxas says.

    To be entered before anything imports fastqt.kernels: Triton looks once whether it is to interpret.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as cache:
        # What comes from the cache has no ptxas to say anything, so nothing does.
        os.environ.update(TRITON_CACHE_DIR=cache, TRITON_ALWAYS_COMPILE="1", TRITON_DUMP_PTXAS_LOG="1")
        yield


def kernels() -> dict[str, list[str]]:
    """The kernels that are launched, and the names of their flags."""
    from triton.runtime.jit import JITFunction

    import fastqt.kernels
    from fastqt.kernels.plan import Planned

    flags = {}
    for module in pkgutil.walk_packages(fastqt.kernels.__path__, "fastqt.kernels."):
        for name, kernel in vars(importlib.import_module(module.name)).items():
            kernel = kernel.jit_function if isinstance(kernel, Planned) else kernel
            if isinstance(kernel, JITFunction) and name.endswith("_kernel"):
                flags[name] = flag_names(kernel)
    return flags


def key(gpu: Gpu, case: Case, wanted: str) -> str:
    return f"sm_{gpu.arch}: {case.name}: {wanted}"


def chosen(events: list[Event], wanted: str) -> Launch | None:
    """The first launch that is wanted."""
    return next((e for e in events if isinstance(e, Launch) and e.matches(wanted)), None)


def attempt(
    events: list[Event], wanted: str, gpu: Gpu, *, disassembled: bool = False, anew: bool = False
) -> dict[str, Any]:
    """What became of the first launch that is wanted, or the error that did."""
    try:
        launch = chosen(events, wanted)
        if launch is None:
            return {"error": "the schedule makes no such launch"}
        return compiled(launch, gpu, disassembled=disassembled, anew=anew)
    except Exception as error:  # Triton raises what it likes: whoever asked shows it in place of the figures
        return {"error": f"{type(error).__name__}: {error}"}


def cost(case: Case, gpu: Gpu) -> dict[str, float]:
    """How much is launched, and the terms of all matrix products as multiples of one of (N, D) by (D, N)."""
    events = noted(case, gpu)
    terms = 0
    for event in events:
        if isinstance(event, Product):
            terms += event.n * event.m * event.k
        elif isinstance(event, Launch) and event.matches("scores_kernel"):
            terms += event.arguments["N"] * event.arguments["candidates"].shape[0] * case.D
    return {"launches": len(events), "products": terms / (case.N**2 * case.D)}


def compile_all(only: Collection[str] | None = None, *, anew: bool = False) -> dict[str, Any]:
    """The names of all kernels that are launched, specialisations by `key`, and what the losses cost.

    Args:
        only: keys of the specialisations that are compiled; by default all are. The constants of all are
            returned in either case.
        anew: do not take what is stored.
    """
    constants, specialisations = {}, {}
    for gpu in GPUS:
        for case in CASES:
            if gpu.arch not in case.archs:
                continue
            events = noted(case, gpu)
            for wanted in case.wanted:
                name, launch = key(gpu, case, wanted), chosen(events, wanted)
                if launch is not None:
                    constants[name] = {"kernel": launch.kernel.__name__, "flags": launch.flags}
                if only is None or name in only:
                    specialisations[name] = attempt(events, wanted, gpu, anew=anew)
    costs = {key(gpu, case, "cost"): cost(case, gpu) for gpu in GPUS for case in COUNTED}
    return {"kernels": kernels(), "constants": constants, "specialisations": specialisations, "costs": costs}


def in_a_process_of_its_own(only: Collection[str], *, anew: bool = False) -> dict[str, Any]:
    """`compile_all`, from where Triton interprets."""
    command = [sys.executable, "-m", "benchmarks.offline.compile", *["--anew"] * anew, "--only", *only]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(run.stdout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", metavar="KEY", help="compile these specialisations alone")
    parser.add_argument("--anew", action="store_true", help="do not take what is stored")
    parser.add_argument("--write", action="store_true", help=f"store {STORED.name}")
    options = parser.parse_args()
    if options.write and options.only is not None:
        parser.error("--write stores all specialisations, and --only compiles some")
    with compiler():
        print(json.dumps(compile_all(options.only, anew=options.anew), indent=1))
        if options.write:
            store((cache(gpu.arch, anew=options.anew) for gpu in GPUS), STORED)
