"""Build of the one native extension, `fastqt._C`.

It uses libtorch's stable ABI and Python's limited API, so that one wheel serves
every Python >= 3.10 and torch >= 2.11. Without a C++ compiler (or with
FASTQT_PURE=1) the package is built without it and runs on its PyTorch path.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup


def compiler() -> str | None:
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if shutil.which(name.split()[0]):
            return name
    return None


def native_build() -> dict[str, object]:
    if os.environ.get("FASTQT_PURE") == "1" or compiler() is None:
        print("fastqt: building without fastqt._C (no C++ compiler, or FASTQT_PURE=1)", file=sys.stderr)
        return {}
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    extension = CppExtension(
        "fastqt._C",
        sources=sorted(str(path) for path in Path("csrc").rglob("*.cpp")),
        include_dirs=[str(Path("csrc").resolve())],
        depends=sorted(str(path) for path in Path("csrc").rglob("*.h")),
        define_macros=[("TORCH_TARGET_VERSION", "0x020b000000000000"), ("Py_LIMITED_API", "0x030a0000")],
        extra_compile_args=[
            *("-O3", "-std=c++20", "-fopenmp-simd", "-fvisibility=hidden", "-Wall", "-Wextra"),
            # Nothing here looks at floating-point exceptions or errno; without these AVX2 gets scalar loops.
            *("-fno-trapping-math", "-fno-math-errno"),
        ],
        py_limited_api=True,
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**native_build())
