"""The Triton kernels compiled for GPUs that are not here: no register spills, tensor cores are used.

What the compiler said is stored with the sources that it was said of; after a change of the kernels all that
a test looks at is compiled anew. `make test` looks at one specialisation of each kernel for one GPU, `make
test-all` at every one for all GPUs.
"""

import itertools
import json
import random
import shutil

import pytest

from benchmarks.offline import amd, small_nvidia
from benchmarks.offline.cache import CompileCache, python_files, store
from benchmarks.offline.cases import CASES, COUNTED
from benchmarks.offline.compile import in_a_process_of_its_own, key
from benchmarks.paths import ROOT
from tests.shared.launches import GPUS
from tests.shared.processes import printed

SAMPLED_ARCH = 90


def specialisations():
    sampled = set()
    for gpu in GPUS:
        for case in (case for case in CASES if gpu.arch in case.archs):
            for wanted in case.wanted:
                kernel = wanted.split()[0]
                sample = gpu.arch == SAMPLED_ARCH and kernel not in sampled
                sampled |= {kernel} if sample else set()
                marks = () if sample else pytest.mark.slow
                yield pytest.param(gpu, case, wanted, id=key(gpu, case, wanted), marks=marks)


SPECIALISATIONS = list(specialisations())
SCORES = [p for p in SPECIALISATIONS if p.values[2].startswith("scores_kernel")]
TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
# Of constants that are neither on nor off, or have code of their own where they are off.
CHOICES: dict[object, set[object]] = {
    "ROW_NEGATIVE": {0, 1, 2, 3},
    ("gradient_kernel", "ROW_NEGATIVE"): {0, 1, 2},  # A score has no embedding.
    "DIAGONAL": {0, 1, 2},
    "SAMPLE_TILES": {2},
    "MULTIPLES": {1, 2},
    "EVEN_M": {0, 1},
    "EVEN_D": {0, 1},
    "EPILOGUE": {"ROW_MAX", "EXP", "SIGMOID", "EXP_ROWS_AND_COLUMNS"},
}

FROM_HOPPER = {"DESCRIPTORS"}
# Launches at N = 4,096, the sum of the losses among them, and matrix products: shifts come from a sample
# of 1/16 or 1/8 of the scores.
COSTS = {
    "softmax": (12, 3 + 1 / 16),
    "softmax, mask": (14, 3 + 1 / 16),  # which may exclude a target
    "softmax, low": (21, 4 + 1 / 16),
    "sigmoid": (18, 3),
    "CLIP": (33, 3 + 1 / 8),
    "MixCSE released": (16, 3),
}
LAUNCHES = {(100, "softmax, low"): 25}  # all of whose chunks are of rows, with row kernels of their own


@pytest.fixture(scope="module")
def found(request):
    """What is known of the kernels, with the specialisations compiled that the selected tests look at."""
    items = (item for item in request.session.items if item.path == request.path)
    calls = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return in_a_process_of_its_own(
        sorted({key(call["gpu"], call["case"], call["wanted"]) for call in calls if "wanted" in call})
    )


@pytest.mark.slow
def test_the_compiler_says_what_is_stored(found):
    """Of some specialisations, which are others after each change of the kernels."""
    draw = random.Random(str(sorted(found["constants"].items())))
    names = [p.id for p in draw.sample(SPECIALISATIONS, 6)]
    assert (
        in_a_process_of_its_own(names, anew=True)["specialisations"]
        == (in_a_process_of_its_own(names)["specialisations"])
    )


def result(found, gpu, case, wanted):
    compiled = found["specialisations"][key(gpu, case, wanted)]
    assert "error" not in compiled, compiled["error"]
    return compiled


@pytest.mark.parametrize(("gpu", "case", "wanted"), SPECIALISATIONS)
def test_fits_without_spills(found, gpu, case, wanted):
    compiled = result(found, gpu, case, wanted)
    assert compiled["spills"] == 0
    assert compiled["stack"] == 0
    assert compiled["shared"] <= gpu.shared
    assert compiled["registers"] <= 255
    assert compiled["registers"] * compiled["threads"] <= 2**16


@pytest.mark.parametrize(("gpu", "case", "wanted"), SCORES)
def test_scores_use_tensor_cores(found, gpu, case, wanted):
    uses = result(found, gpu, case, wanted)["instructions"]
    in_full_precision = case.dtype == "float32" and case.precision == "highest"
    for arch, instruction in TENSOR_CORES.items():
        expected = arch == gpu.arch and not in_full_precision
        assert (uses[instruction] > 0) == expected, f"{instruction}: {uses[instruction]}"


@pytest.mark.parametrize(("gpu", "case", "wanted"), SCORES)
def test_loads_run_ahead_of_products(found, gpu, case, wanted):
    uses = result(found, gpu, case, wanted)["instructions"]
    assert (uses["cp.async"] > 0) == case.loads_ahead


@pytest.mark.parametrize(("gpu", "case", "wanted"), SCORES)
def test_single_elements_are_loaded_of_small_problems_alone(found, gpu, case, wanted):
    """Larger ones have copies whose rows are aligned, where those of the embeddings are not."""
    loads = result(found, gpu, case, wanted)["instructions"]["ld.global.b16"]
    aligned = case.D % 8 == 0 or case.N**2 >= 2**21
    assert (loads == 0) == aligned


@pytest.mark.parametrize(("gpu", "case", "wanted"), [p for p in SCORES if "out" in p.values[2].split()])
def test_exponentials_are_single_instructions_and_stored_in_full_width(found, gpu, case, wanted):
    uses = result(found, gpu, case, wanted)["instructions"]
    scores_alone = "-tile_row_sums" in wanted and "-row_factors" in wanted
    assert (uses["ex2.approx"] == 0) == scores_alone
    assert uses["st.global.v4"] > 0


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"sm_{gpu.arch}")
def test_every_kernel_and_option_is_among_the_specialisations(found, gpu):
    kernels, seen = set(), {}
    for name, launch in found["constants"].items():
        if name.startswith(f"sm_{gpu.arch}:"):
            kernels.add(launch["kernel"])
            for flag, value in launch["flags"].items():
                seen.setdefault((launch["kernel"], flag), set()).add(value)
    assert kernels == set(found["kernels"])
    for kernel, flags in found["kernels"].items():
        for flag in flags:
            if flag in FROM_HOPPER and gpu.arch < 90:
                continue
            # Most options that are off leave no code; one that is on must be there.
            missing = CHOICES.get((kernel, flag), CHOICES.get(flag, {1})) - seen[kernel, flag]
            assert not missing, f"{kernel} with {flag} = {sorted(missing)}"


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"sm_{gpu.arch}")
@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_costs_these_launches_and_products(found, gpu, case):
    cost, (launches, products) = found["costs"][key(gpu, case, "cost")], COSTS[case.name]
    assert cost["launches"] == LAUNCHES.get((gpu.arch, case.name), launches)
    assert cost["products"] == products


def test_what_is_stored_of_small_gpus_fits():
    specialisations = json.loads(small_nvidia.RESULTS.read_text())["specialisations"]
    kernels = {arch: set() for arch in small_nvidia.GPUS}
    for name, figures in specialisations.items():
        arch = name.split(":")[0]
        kernels[arch].add(figures["kernel"])
        assert figures["shared"] <= small_nvidia.GPUS[arch].shared, name
        assert figures["registers"] * figures["threads"] <= 2**16, name
    assert len(kernels["sm_89"]) > 12
    assert kernels["sm_89"] == kernels["sm_120"]


def check_amd(specialisations):
    for name, figures in specialisations.items():
        assert figures["scratch"] == 0, name
        assert figures["lds"] <= amd.GPUS[name.split(":")[0]].shared, name
        if figures["kernel"] == "scores_kernel":
            assert figures["matrix_instructions"] > 0, name


def test_what_is_stored_fits():
    specialisations = json.loads(amd.RESULTS.read_text())["specialisations"]
    check_amd(specialisations)
    kernels = {
        arch: {x["kernel"] for name, x in specialisations.items() if name.startswith(arch)}
        for arch in amd.GPUS
    }
    assert len(kernels["gfx90a"]) > 12
    assert kernels["gfx90a"] == kernels["gfx942"] == kernels["gfx950"]


@pytest.mark.slow
def test_one_launch_of_each_kernel_compiles():
    specialisations = json.loads(printed("-m", "benchmarks.offline.amd", "--quick"))["specialisations"]
    check_amd(specialisations)
    stored = json.loads(amd.RESULTS.read_text())["specialisations"].values()
    assert {x["kernel"] for x in specialisations.values()} == {x["kernel"] for x in stored}


def test_a_change_to_any_source_or_compiler_is_compiled_anew(tmp_path):
    """Each cache here is one of its own, as those of two processes are; a failure is not kept."""
    kernels = shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    calls = itertools.count()

    def is_compiled(versions=("triton 1", "ptxas 1"), key="a kernel"):
        before = next(calls)
        cache = CompileCache(python_files(kernels), versions, tmp_path / "cache")
        found = cache.get(key, lambda: {"registers": next(calls)})
        return found == {"registers": before + 1}

    assert is_compiled()
    assert not is_compiled()
    for path in python_files(kernels):
        path.write_text(path.read_text() + "\n")
        assert is_compiled(), path
        assert not is_compiled(), path
    (kernels / "scores" / "new.py").write_text("")
    assert is_compiled()
    (kernels / "scores" / "new.py").rename(kernels / "new.py")
    assert is_compiled()
    assert is_compiled(("triton 2", "ptxas 1"))
    assert is_compiled(("triton 1", "ptxas 2"))
    assert is_compiled(key="another kernel")

    # What is stored is taken as long as it is of these sources and this compiler.
    path = tmp_path / "stored.json"
    cache = CompileCache(python_files(kernels), ["triton 1"], tmp_path / "cache")
    cache.get("a kernel", lambda: {"registers": 7})
    store([cache], path)
    shutil.rmtree(tmp_path / "cache")
    for versions, registers in ((["triton 1"], 7), (["triton 2"], 8)):
        cache = CompileCache(python_files(kernels), versions, tmp_path / "cache", path)
        assert cache.get("a kernel", lambda: {"registers": 8}) == {"registers": registers}
        assert cache.get("another kernel", lambda: {"registers": 9}) == {"registers": 9}
    (kernels / "new.py").write_text("# changed\n")
    cache = CompileCache(python_files(kernels), ["triton 1"], tmp_path / "cache", path)
    assert cache.get("a kernel", lambda: {"registers": 8}) == {"registers": 8}

    cache = CompileCache(python_files(kernels), [], tmp_path / "cache")
    with pytest.raises(ZeroDivisionError):
        cache.get("a kernel", lambda: {"registers": 1 // 0})
    assert cache.get("a kernel", lambda: {"registers": 7}) == {"registers": 7}
