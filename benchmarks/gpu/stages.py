"""What `benchmarks.gpu_check` runs: the stages, their sections, and the time limit of each section.

A stage is a list of waves. The sections of a wave run at once; those that measure times have a wave alone. A
stage takes at most what its limits add up to, and that is less than nine minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.gpu.processes import OVERHEAD
from benchmarks.gpu.sections import MEMORY, Options, Section

STAGES = ("all", "first", "speed", "checks")
LONGEST_STAGE = 525.0  # seconds, so that nine minutes hold the start of Python too
LONGEST_SMOKE = 60.0

DTYPES = ("float32", "bfloat16", "float16")
SCORES = ("ROW_MAX", "EXP", "SIGMOID", "EXP_ROWS_AND_COLUMNS")
MODULES = {  # that import other libraries which compute such a loss
    "liger-kernel": "liger_kernel",
    "cut-cross-entropy": "cut_cross_entropy",
    "quack-kernels": "quack",
    "siglip-kernel": "siglip_kernel",
    "memeff": "memeff",
}

Wave = list[Section]

SANITIZED = Section("sanitized", 50, "benchmarks.gpu.sanitizer:sanitized")
SANITIZED_ALONE = 120.0  # seconds of these calls, which the sanitizer makes three times, in their own stage


def waves(stage: str, options: Options) -> list[Wave]:
    """The sections of a stage in their order."""
    made = {
        "all": lambda: [*smoke(one_launch()), *speed(options), checks(options)],
        # The extension, which one engine needs, is built when all that needs no build is known.
        "first": lambda: [
            *smoke(),
            *watched(warming(options)),
            [profile(options)],
            [BUILD],
            [one_launch()],
        ],
        "speed": lambda: [[MACHINE], [tuning(options)], *speed(options)],
        "checks": lambda: [[MACHINE], checks(options, SANITIZED_ALONE)],
    }
    return made[stage]()


def longest(planned: list[Wave]) -> float:
    """Seconds that waves take if everything hangs."""
    return sum(max(section.seconds for section in wave) + OVERHEAD for wave in planned)


MACHINE = Section("machine", 13, "benchmarks.gpu.smoke.machine:machine_facts")
BUILD = Section("build", 300, "benchmarks.gpu.build:build")


def step(name: str, run: str, seconds: float = 25, exact: bool = True, **arguments: str) -> Section:
    """A smoke step. Twice ten seconds without progress hang: so long do so many processes import torch."""
    # With this variable an error is raised by the launch that caused it; graphs cannot be captured so.
    environment = {"CUDA_LAUNCH_BLOCKING": "1"} if exact else {}
    path = f"benchmarks.gpu.smoke.{run}"
    return Section(f"smoke, {name}", seconds, path, arguments, 20, environment, own_cache=True)


def one_launch() -> Section:
    """The smoke step of the engine that the extension has."""
    return step("one launch", "losses:one_launch")


def smoke(*more: Section) -> list[Wave]:
    """What is to be known before anything else: whether each part works at all, and if not, why.

    Args:
        more: steps beside these.
    """
    return [
        [MACHINE],
        [
            step("16-bit products into float32", "products:products"),
            *(step(f"scores {name}", "scores:scores", epilogue=name) for name in SCORES),
            *(step(f"loss {memory}", "losses:loss", memory=memory) for memory in MEMORY),
            *(step(f"large tiles {memory}", "losses:large_tiles", memory=memory) for memory in MEMORY),
            *(step(f"TF32 {memory}", "losses:tf32", memory=memory) for memory in MEMORY),
            *more,
            step("graph", "losses:graph", exact=False),
            step("side stream", "losses:side_stream", exact=False),
        ],
        [step("vendor's products", "vendor:vendor_products", 14, exact=False)],
    ]


def warming(options: Options) -> list[Wave]:
    """Every problem that is measured later runs once, all at the same time: Triton keeps what it compiles."""
    from benchmarks.gpu.shapes import measured

    names = [(shape, name) for shape in measured(options) for name in ("fast", "low")]
    return [
        [
            Section(
                f"warm, {shape.name}, {memory}",
                45,
                "benchmarks.gpu.figures:warm",
                {"sizes": [shape.N, shape.M, shape.D], "memory": memory},
            )
            for shape, memory in names
        ]
    ]


def watched(planned: list[Wave]) -> list[Wave]:
    """The same, and beside the last wave the sanitizer on the kernels of large problems.

    It begins first, because it takes the longest.
    """
    *others, last = planned
    path = "benchmarks.gpu.sanitizer:memcheck_large"
    seconds = max(section.seconds for section in last)
    section = Section("memcheck, large tiles", seconds, path, {"seconds": seconds - OVERHEAD})
    return [*others, [section, *last]]


def speed(options: Options) -> list[Wave]:
    """Times of everything, each beside the three matrix products of its shape."""
    path = "benchmarks.gpu.figures:benchmark"
    planned = [
        *warming(options),
        [Section("benchmark", 85, path, {"contestants": "fused_and_eager"})],
        [Section("graphs", 45, path, {"contestants": "fused_and_eager", "graphed": True})],
        [Section("losses of pairs", 40, path, {"contestants": "of_pairs"})],
    ]
    if importable_peers():
        planned.append([Section("peers", 35, path, {"contestants": "peers_present"})])
    return [*planned, [Section("compiled", 35, path, {"contestants": "compiled", "smallest_first": True})]]


def importable_peers() -> list[str]:
    """The other libraries that are there."""
    return [name for name, module in MODULES.items() if find_spec(module) is not None]


def tuning(options: Options) -> Section:
    minutes = 0.1 if options.dry_run else 3.0
    return Section("tune", 195, "benchmarks.gpu.tuning:tuned", {"minutes": minutes})


def profile(options: Options) -> Section:
    return Section("profile", 60, "benchmarks.gpu.profile:profile")


def checks(options: Options, sanitized_seconds: float = SANITIZED.seconds) -> Wave:
    """Everything that says whether results are right."""
    return list(_checks(options, sanitized_seconds))


def _checks(options: Options, sanitized_seconds: float) -> Iterator[Section]:
    engines = {memory: {"memory": memory} for memory in MEMORY}
    engines["one launch"] = {"memory": "fast", "backend": "cuda"}
    limit, planned = 3 * (sanitized_seconds + OVERHEAD) + 1, []
    for name in ("cases", "accuracy"):
        for dtype in ("bfloat16",) if options.quick else DTYPES:
            planned += [
                Section(
                    f"{name}, {dtype}, {engine}",
                    limit,
                    f"benchmarks.gpu.correctness:{name}",
                    {"dtype": dtype, **chosen},
                )
                for engine, chosen in engines.items()
            ]
    yield from (planned[0], planned[-2]) if options.dry_run else planned
    yield Section("behaviour", limit, "benchmarks.gpu.behaviour:behaviour")
    arguments = {"seconds": sanitized_seconds}
    yield Section("sanitizer", limit, "benchmarks.gpu.sanitizer:sanitizer", arguments)
