"""The operator of the one-launch kernel launches on the device and stream of its tensors, or says why not.

csrc/cuda/small_contrastive.cu is built as C++ against a CUDA runtime that only notes its calls. The tensors
are on CUDA devices that are not there, and in the host's memory.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

from tests.csrc import building
from tests.csrc.cuda.host_execution import HOST

ABSENT = "tests/csrc/cuda/absent"
HEADERS = ("csrc/cuda/*.h", "csrc/cuda/*.cuh", f"{HOST}/*.h", f"{HOST}/cuda/*.h", f"{ABSENT}/*.h")
FLAGS = ("-std=c++20", "-O0", "-fPIC", "-Wall", "-Wextra", "-Werror", "-x", "c++")
INCLUDE = (f"-I{ABSENT}", f"-I{HOST}", "-Icsrc")

# Prints the calls of the runtime, its current device afterwards and the error of each launch, which is given
# as the device of its tensors and the call of the runtime that is to fail.
RUN = """
import ctypes, json, sys
ctypes.CDLL(sys.argv[1])
import torch
torch.cuda._lazy_init = lambda: None
torch.ops.load_library(sys.argv[2])
runtime = ctypes.CDLL(sys.argv[2])
runtime.calls.restype, runtime.calls.argtypes = ctypes.c_char_p, [ctypes.c_char_p]

def launch(device):
    def new(*shape, dtype=torch.float64):
        return torch.empty(shape, dtype=dtype, device=device)
    rows = [new(3, 4, dtype=torch.bfloat16) for _ in range(2)]
    targets = new(4, dtype=torch.int64), new(0, dtype=torch.int64), new(0)
    torch.ops.fastqt.small_contrastive_.default(
        *rows, None, None, 1.0, None, 1.0, 0, *targets, None, 1.0, False, new(3), new(3), new(3), *[None] * 5
    )

found = []
for device, failing in json.loads(sys.argv[3]):
    runtime.calls(failing.encode())
    error = None
    try:
        launch(device)
    except RuntimeError as raised:
        error = str(raised)
    found.append([runtime.calls(b"").decode(), runtime.current_device(), error])
print(json.dumps(found))
"""

pytestmark = [
    pytest.mark.skipif(building.compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="wants Linux"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a library for CUDA devices"),
]


def build(*flags: str) -> tuple[str, str]:
    """The libraries of the devices and of the operator; the runtime is compiled with `flags`."""
    torch_ = [f"-isystem{path}" for path in include_paths()]
    link = [option for path in library_paths() for option in (f"-L{path}", f"-Wl,-rpath,{path}")]
    options = {"headers": HEADERS, "versions": [torch.__version__]}
    # The libraries come before the objects that need them, so the linker must be told to keep them.
    options["link"] = (*building.MODULE, *link, "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10")
    devices = building.build({f"{ABSENT}/devices.cpp": (*FLAGS, *torch_)}, **options)
    kernels = (*FLAGS, *INCLUDE, *torch_, "-DTORCH_TARGET_VERSION=0x020b000000000000")
    sources = {
        "csrc/cuda/small_contrastive.cu": kernels,
        f"{ABSENT}/runtime.cpp": (*kernels, *flags),
        f"{HOST}/fibres.cpp": (*FLAGS, *INCLUDE),
    }
    return str(devices), str(building.build(sources, **options))


def launched(libraries: tuple[str, str], *launches: tuple[str, str]) -> list[tuple[str, int, str | None]]:
    """Of each launch the runtime's calls, its current device afterwards, and the error."""
    command = [sys.executable, "-c", RUN, *libraries, json.dumps(launches)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, (done.returncode, done.stderr)
    return [tuple(found) for found in json.loads(done.stdout)]


@pytest.mark.slow
def test_launches_on_the_tensors_device_and_restores_the_current_one():
    """The current device of the library's runtime is 0, whatever torch's is."""
    prepared = "cudaFuncSetAttribute on {0}; cudaOccupancyMaxActiveBlocksPerMultiprocessor on {0}; "
    launch = "cudaLaunchCooperativeKernel on {0}, stream 100{0}, blocks {1}; "
    first, second, other, failed, unset, unknown = launched(
        build("-DWITH_STREAMS"),
        *(("cuda:1", ""), ("cuda:1", ""), ("cuda:0", "")),
        *(
            ("cuda:1", "cudaLaunchCooperativeKernel"),
            ("cuda:1", "cudaSetDevice"),
            ("cuda:1", "cudaGetDevice"),
        ),
    )
    there, back = "cudaSetDevice 1; ", "cudaSetDevice 0; "
    assert first == (there + prepared.format(1) + launch.format(1, 3) + back, 0, None)
    assert second == (there + launch.format(1, 3) + back, 0, None)
    assert other == (prepared.format(0) + launch.format(0, 2), 0, None)
    # Errors name the call, and the device is restored all the same.
    assert failed[:2] == (there + launch.format(1, 3) + back, 0)
    assert "cudaLaunchCooperativeKernel: cudaErrorLaunchFailure" in failed[2]
    assert unset[:2] == (there, 0)
    assert "cudaSetDevice: cudaErrorLaunchFailure" in unset[2]
    assert unknown[:2] == ("", 0)
    assert "cudaGetDevice: cudaErrorLaunchFailure" in unknown[2]


def test_a_torch_without_cuda_is_an_error_in_words():
    """Its library has no streams to ask for: the symbol is weak and null, and a call of it would crash."""
    ((calls, device, error),) = launched(build(), ("cuda:1", ""))
    assert (calls, device) == ("", 0)
    assert "backend='cuda': want a torch that was built with CUDA, got one without" in error
