"""What `show_config` says of a machine and of a build."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fastqt
from fastqt.engines import ops, report

# The headers of entries as nvcc 13.0 wrote them for sm_80, for sm_90a and, as PTX, for compute_100.
HEADERS = {
    "sm_80": "0200010140000000400300000000000040030000000000000800010050000000"
    "00000000000000001180000000000000" + "00" * 8 + "a80b000000000000",
    "sm_90a": "0200010140000000a803000000000000a503000000000000080001005a000000"
    "00000000000000001180100000000000" + "00" * 8 + "f00d000000000000",
    "PTX of compute_100": "0100010150000000d800000000000000d2000000400000000000090064000000"
    "00000000000000001180000000000000" + "00" * 8 + "2201000000000000" + "48" + "00" * 15,
}


def collection(*names):
    """A collection of code for GPUs, with zeros in place of the code."""
    entries = b""
    for name in names:
        header = bytes.fromhex(HEADERS[name])
        entries += header + bytes(int.from_bytes(header[8:16], "little"))
    return bytes.fromhex("50ed55ba01001000") + len(entries).to_bytes(8, "little") + entries


def test_the_code_for_gpus_in_a_library_is_found():
    whole = b"\x7fELF" + bytes(99) + collection(*reversed(HEADERS)) + b"x" * 7 + collection("sm_80")
    assert report.architectures(whole) == list(HEADERS)
    assert report.architectures(whole[103:]) == list(HEADERS)
    assert report.architectures(bytes(1000)) == []
    for end in range(0, len(whole), 41):  # of a damaged library nothing is made up, and the search ends
        assert set(report.architectures(whole[:end])) <= set(HEADERS)


def test_a_library_without_code_for_gpus_says_why(monkeypatch):
    monkeypatch.setattr(ops, "cuda_error", "no compiler")
    assert report.cuda_code() == "none: no compiler"


def test_the_code_of_a_build_with_cuda_is_named(monkeypatch, tmp_path):
    (tmp_path / "library.so").write_bytes(collection("sm_90a"))
    monkeypatch.setattr(ops, "cuda_error", None)
    monkeypatch.setattr(sys.modules["fastqt._C"], "__file__", str(tmp_path / "library.so"))
    assert report.cuda_code() == "sm_90a"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 1 for", "Intel MKL 2024.2"),
        ("  - Build settings: BLAS_INFO=open, BUILD_TYPE=Release", "open"),
        ("PyTorch built with:", "of torch, which does not name it"),
    ],
)
def test_the_library_of_matrix_products_is_named(monkeypatch, text, name):
    monkeypatch.setattr(torch.__config__, "show", lambda: text)
    assert report.blas().split(";")[0] == name


@pytest.mark.parametrize(
    ("machine", "flags", "level"),
    [
        ("x86_64", "fma avx2 bmi1 bmi2 f16c movbe avx512f", "x86-64-v3, AVX2"),
        ("x86_64", "avx512f avx512bw avx512cd avx512dq avx512vl", "x86-64-v4, AVX-512"),
        ("x86_64", "sse2 avx2", "x86-64, SSE2"),
        ("aarch64", "", "NEON"),
    ],
)
def test_the_level_of_vector_instructions_follows_from_the_processor(monkeypatch, machine, flags, level):
    """Of those that the library is compiled for, the highest one all of whose flags are there."""
    monkeypatch.setattr(report.platform, "machine", lambda: machine)
    monkeypatch.setattr(report.sys, "platform", "linux")
    monkeypatch.setattr(report.Path, "read_text", lambda path, **_: f"processor: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(ops, "native_error", None)
    assert report.simd().startswith(f"{level} (torch: ")
    monkeypatch.setattr(ops, "native_error", "not built")
    assert report.simd().startswith("none, ")


def test_why_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert report.why_no_gpu().endswith("is built for CPUs alone")
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def fail():
        raise RuntimeError("Found no NVIDIA driver on your system. Please\ncheck")

    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert report.why_no_gpu() == "Found no NVIDIA driver on your system. Please"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert report.why_no_gpu() == "CUDA_VISIBLE_DEVICES is empty"


def lines_of(capsys):
    fastqt.show_config()
    return capsys.readouterr().out.splitlines()


def test_every_line_has_a_name_and_words(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    named = [line.split()[0] for line in lines_of(capsys)]
    once = ["fastqt", "torch", "python", "threads", "products", "simd", "cuda", "gpu"]
    assert named == [*once, *["backend"] * 5, "device"]
    triton = next(line for line in lines_of(capsys) if line.startswith("backend  triton"))
    assert "it needs a GPU, and " in triton
    assert "tensors" not in triton
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "backend  triton     usable" in lines_of(capsys)


def test_a_device_names_what_computes_there_and_why(monkeypatch, capsys):
    monkeypatch.setattr(report, "devices", lambda: [torch.device("cpu"), torch.device("mps", 0)])
    lines = lines_of(capsys)
    assert lines[-2] == "device   cpu        computes with cpu"
    assert lines[-1].startswith("device   mps        computes with torch")
    assert "cpu: the tensors are on mps:0" in lines[-1]
    assert "triton: the tensors are on mps:0, for which its kernels have never been compiled" in lines[-1]


def test_the_gpus_are_named(monkeypatch, capsys):
    class Properties:
        name, major, minor, total_memory = "Some GPU", 9, 0, 80 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: Properties)
    lines = lines_of(capsys)
    assert lines.count("gpu      Some GPU, sm_90, 81,920 MiB") == 2
    assert "backend  triton     usable" in lines


@pytest.mark.slow
def test_a_library_that_nvcc_has_made_is_read(tmp_path):
    """The layout of the headers is not documented: this asks the compiler, where there is one."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    (tmp_path / "a.cu").write_text("__global__ void f(float* x) { x[0] = 1; }\n")
    target = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in ("80", "90a", "100f")]
    target += ["-gencode=arch=compute_100,code=compute_100"]
    command = [nvcc, "-c", "-Xfatbin", "-compress-all", *target, "a.cu", "-o", "a.o"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert report.architectures((tmp_path / "a.o").read_bytes()) == [
        *("sm_80", "sm_90a", "sm_100f"),
        "PTX of compute_100",
    ]


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (collection("sm_90a"), "with CUDA code for sm_90a"),
        (bytes(1000), "without CUDA code: the build found no nvcc, or was to use none (FASTQT_CUDA_HOME)"),
        (None, "without the extension: its losses are computed in torch's own operations"),
    ],
    ids=["CUDA", "CPUs alone", "pure"],
)
def test_make_wheel_ends_with_the_code_that_a_wheel_holds(tmp_path, library, words):
    wheel, program = tmp_path / "fastqt.whl", Path(__file__).parents[2] / "packaging" / "wheel_code.py"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("fastqt/__init__.py", "")
        if library is not None:
            files.writestr("fastqt/_C.abi3.so", library)
    done = subprocess.run([sys.executable, program, wheel], capture_output=True, text=True, check=True)
    assert done.stdout == f"{wheel}: {words}\n"


@pytest.mark.parametrize(
    ("levels", "asked", "timed", "text"),
    [
        ((0, 0, 0, 0), "", False, "those of torch: {blas}"),
        (
            *((0, 0, 1, 0), "", False),
            "those of torch: {blas} (fastqt's own, with NEON); not timed on such a processor: "
            "FASTQT_CPU_PRODUCTS=own or =torch decides otherwise",
        ),
        (
            *((0, 4, 3, 5), "", True),
            "those of torch: {blas} (fastqt's own, with AVX-512 and AMX); the faster where both were timed",
        ),
        (
            *((3, 4, 3, 4), "", True),
            "fastqt's own, with AVX-512 and AVX512-BF16 (torch: {blas}); the faster where both were timed",
        ),
        (
            *((3, 5, 3, 5), "own", True),
            "fastqt's own, with AVX-512 and AMX (torch: {blas}); as FASTQT_CPU_PRODUCTS asks",
        ),
        (
            *((0, 0, 3, 4, True), "", True),
            "those of torch: {blas} (fastqt's own, with AVX-512 and AVX512-BF16); the faster where both "
            "were timed; bfloat16 is multiplied in float32, which is faster here",
        ),
        (
            *((0, 0, 3, 5, True), "", True),
            "those of torch: {blas} (fastqt's own, with AVX-512 and AMX); the faster where both were timed",
        ),
    ],
)
def test_what_multiplies_on_a_cpu_is_named(monkeypatch, levels, asked, timed, text):
    slow_bfloat16 = levels[4:] == (True,)
    operators = SimpleNamespace(product_levels=lambda: (*levels[:4], timed, slow_bfloat16))
    monkeypatch.setattr(report.ops, "native_error", None)
    monkeypatch.setattr(torch.ops, "fastqt", operators)
    monkeypatch.setenv("FASTQT_CPU_PRODUCTS", asked)
    assert report.products() == text.format(blas=report.blas())
