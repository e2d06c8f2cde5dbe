"""Build of the one native extension, `fastqt._C`.

It uses libtorch's stable ABI and Python's limited API, so that one wheel serves every Python >= 3.10 and
torch >= 2.11, with and without CUDA. CUDA code is part of it where nvcc is found, in FASTQT_CUDA_HOME,
CUDA_HOME or /usr/local/cuda, for the architectures of TORCH_CUDA_ARCH_LIST. Without a C++ compiler (or with
FASTQT_PURE=1) the package is built without the extension and runs on its PyTorch path.
"""

import os
import platform
import re
import shutil
import sys
from pathlib import Path

from setuptools import setup

CUDA_ARCHITECTURES = "8.0;9.0a;10.0+PTX"
EXPORTS = Path("csrc/exports.map")


def compiler() -> str | None:
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if shutil.which(name.split()[0]):
            return name
    return None


def cuda_home() -> Path | None:
    """Where CUDA's compiler is; an empty FASTQT_CUDA_HOME says that it is not wanted."""
    wanted = os.environ.get("FASTQT_CUDA_HOME")
    places = (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if wanted is None else (wanted,)
    return next((Path(place) for place in places if place and (Path(place) / "bin" / "nvcc").exists()), None)


def sources(*suffixes: str) -> list[str]:
    return sorted(str(path) for path in Path("csrc").rglob("*") if path.suffix in suffixes)


def hardening(torch_include: str) -> tuple[list[str], list[str]]:
    """Flags of the compiler and of the linker against what memory errors are used for, on Linux.

    PyInit__C is all that the library exports, its error messages name files relative to this folder, and it
    loads with an old glibc.
    """
    if not sys.platform.startswith("linux"):
        return [], []

    compile_flags = [
        "-fstack-protector-strong",
        # Python's own flags may ask for another level.
        "-U_FORTIFY_SOURCE",
        "-D_FORTIFY_SOURCE=3",
        # Where both begin a path, the last one holds.
        f"-ffile-prefix-map={Path().resolve()}/=",
        f"-ffile-prefix-map={torch_include}=torch/include",
    ]

    link_flags = [
        "-Wl,-z,relro",
        "-Wl,-z,now",
        "-Wl,-z,noexecstack",
        f"-Wl,--version-script={EXPORTS.resolve()}",
    ]
    if platform.libc_ver()[0] == "glibc" and platform.machine() in ("x86_64", "aarch64"):
        link_flags += ["-Wl,--wrap=exp", "-Wl,--wrap=log"]  # csrc/glibc.cpp says why

    # Python's own flags ask for debugging symbols, four fifths of the file.
    return compile_flags, [*link_flags, "-Wl,-s"]


def native_build() -> dict[str, object]:
    if os.environ.get("FASTQT_PURE") == "1" or compiler() is None:
        print("fastqt: building without fastqt._C (no C++ compiler, or FASTQT_PURE=1)", file=sys.stderr)
        return {}
    from torch.utils import cpp_extension

    common = ["-O3", "-std=c++20"]
    hardened, link = hardening(cpp_extension.include_paths()[0])
    hardened.append("-fvisibility=hidden")
    cxx = [
        "-fopenmp-simd",
        "-Wall",
        "-Wextra",
        *hardened,
        # Nothing here looks at floating-point exceptions or errno; without these AVX2 gets scalar loops.
        "-fno-trapping-math",
        "-fno-math-errno",
    ]
    kernels = sources(".cu")
    home = cuda_home() if kernels else None
    options: dict[str, list[str]] = {}
    if home is None:
        kernels = []
        print("fastqt: building without CUDA code (no nvcc, or none wanted)", file=sys.stderr)
    else:
        cpp_extension.CUDA_HOME = str(home)  # a torch without CUDA does not look for it
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_ARCHITECTURES)
        options = {
            "libraries": ["cudart_static", "rt", "pthread", "dl"],
            "library_dirs": [str(home / "lib64")],
        }
        # What of torch's CUDA half is used is weak, and there where libtorch brings it: keep that loaded.
        link += ["-Wl,--no-as-needed", "-ltorch"]
    extension = cpp_extension.CppExtension(
        "fastqt._C",
        sources=[*sources(".cpp"), *kernels],
        include_dirs=[str(Path("csrc").resolve())],
        depends=[*sources(".h", ".cuh"), str(EXPORTS)],
        define_macros=[("TORCH_TARGET_VERSION", "0x020b000000000000"), ("Py_LIMITED_API", "0x030a0000")],
        extra_compile_args={
            "cxx": [*common, *cxx],
            "nvcc": [
                *common,
                "--threads=0",
                *(part for flag in hardened for part in ("-Xcompiler", flag)),
                "-Xfatbin",
                "-compress-all",
            ],
        },
        extra_link_args=link,
        py_limited_api=True,
        **options,
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": cpp_extension.BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


def description() -> str:
    """The README for a package index: without pictures, comments, and links to files of the repository."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*|<!--.*?-->\n?", "", text, flags=re.DOTALL)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(long_description=description(), long_description_content_type="text/markdown", **native_build())
