"""Build of the one native extension, `fastqt._C`.

It uses libtorch's stable ABI and Python's limited API, so that one wheel serves every Python >= 3.10 and
torch >= 2.11, with and without CUDA. CUDA code is part of it where nvcc is found, in FASTQT_CUDA_HOME,
CUDA_HOME or /usr/local/cuda, for the architectures of TORCH_CUDA_ARCH_LIST.

Without a C++ compiler, with one that fails, or with FASTQT_PURE=1, the package is built without the
extension, and computes on the engine "torch". With FASTQT_REQUIRE_EXTENSION=1 that is an error, as whoever
develops or distributes the package wants it.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from setuptools import setup

CUDA_ARCHITECTURES = "8.0;9.0a;10.0+PTX"
EXPORTS = Path("csrc/exports.map")
CUDA_GLIBC = Path("csrc/cuda/glibc.cpp")  # names the functions of glibc that CUDA's static runtime calls

WITHOUT = """
fastqt: building without its compiled extension, because {reason}.
fastqt: Losses on a CPU then compute in torch's own operations, which is slower. To get the extension, install
fastqt: a C++20 compiler ({compilers}), and fastqt once more, with --force-reinstall --no-cache-dir.
fastqt: "fastqt config" says which engine is used, and docs/faq.md tells more.
"""
BUILDING = {"bdist_wheel", "build", "build_ext", "editable_wheel", "install"}  # commands that ask for it
COMPILERS = {"win32": "Visual Studio's build tools for C++", "darwin": "xcode-select --install"}


def requires_extension() -> bool:
    return os.environ.get("FASTQT_REQUIRE_EXTENSION") == "1"


def tell_of_absence(reason: str) -> None:
    """Says that there is no extension, why, and how one gets it; ends the build if it is required.

    pip runs this file several times, and only once to build.
    """
    if not BUILDING & set(sys.argv):
        return
    if requires_extension():
        raise SystemExit(f"fastqt: FASTQT_REQUIRE_EXTENSION=1 asks for the extension, but {reason}")
    compilers = COMPILERS.get(sys.platform, "g++ or clang++")
    print(WITHOUT.format(reason=reason, compilers=compilers), file=sys.stderr)


def compiler() -> str | None:
    """The command of a C++ compiler, or on Windows the folder of one that setuptools finds by itself."""
    if sys.platform == "win32":
        return shutil.which("cl") or visual_studio()
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if shutil.which(name.split()[0]):
            return name
    return None


def visual_studio() -> str | None:
    """The folder of a Visual Studio that compiles C++, as Microsoft's own program says."""
    program = Path(os.environ.get("PROGRAMFILES(X86)", "")) / "Microsoft Visual Studio/Installer/vswhere.exe"
    if not program.exists():
        return None
    wanted = ["-latest", "-products", "*", "-requires", "Microsoft.VisualStudio.Component.VC.Tools.x86.x64"]
    done = subprocess.run([program, *wanted, "-property", "installationPath"], capture_output=True, text=True)
    return done.stdout.strip() or None


def cuda_home() -> Path | None:
    """Where CUDA's compiler is; an empty FASTQT_CUDA_HOME says that it is not wanted."""
    wanted = os.environ.get("FASTQT_CUDA_HOME")
    places = (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if wanted is None else (wanted,)
    return next((Path(place) for place in places if place and (Path(place) / "bin" / "nvcc").exists()), None)


def sources(*suffixes: str) -> list[str]:
    return sorted(str(path) for path in Path("csrc").rglob("*") if path.suffix in suffixes)


def links_old_glibc() -> bool:
    """Whether the library is linked so that it loads with glibc 2.28, whichever newer one is here."""
    return platform.libc_ver()[0] == "glibc" and platform.machine() in ("x86_64", "aarch64")


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
    if links_old_glibc():
        link_flags += ["-Wl,--wrap=exp", "-Wl,--wrap=log", "-Wl,--wrap=pow"]  # csrc/glibc.cpp says why

    # Python's own flags ask for debugging symbols, four fifths of the file.
    return compile_flags, [*link_flags, "-Wl,-s"]


def cpu_flags() -> list[str]:
    """The flags of the C++ compiler for this system, but for those that harden the library."""
    if sys.platform == "win32":
        # Not /openmp:experimental. It vectorises the loops that are marked for it, but compiles them with
        # /fp:fast, which breaks exp_ of csrc/cpu/vector_math.h and the rules for NaN and infinity.
        return ["/O2", "/std:c++20", "/Zc:preprocessor", "/W3"]
    return [
        "-O3",
        "-std=c++20",
        "-fvisibility=hidden",
        # Only its loops' vectorisation: threads are torch's. Apple's clang has no OpenMP of its own.
        "-fopenmp-simd",
        "-Wall",
        "-Wextra",
        # Nothing here looks at floating-point exceptions or errno; without these AVX2 gets scalar loops.
        "-fno-trapping-math",
        "-fno-math-errno",
    ]


def link_flags() -> list[str]:
    """On macOS, PyInit__C is all that the library exports. On Windows it is so by itself."""
    return ["-Wl,-exported_symbol,_PyInit__C"] if sys.platform == "darwin" else []


class CudaBuild(NamedTuple):
    """What CUDA code adds to the build of the extension; nothing where there is none."""

    sources: Sequence[str] = ()
    libraries: Mapping[str, list[str]] = MappingProxyType({})  # and where they are
    nvcc: Sequence[str] = ()  # flags, as the following
    macros: Sequence[tuple[str, str]] = ()
    link: Sequence[str] = ()


def cuda_build(hardened: list[str]) -> CudaBuild:
    """What the kernels need, if there is an nvcc to compile them."""
    kernels, home = sources(".cu"), cuda_home()
    if not kernels or home is None:
        print("fastqt: building without CUDA code (no nvcc, or none wanted)", file=sys.stderr)
        return CudaBuild()
    from torch.utils import cpp_extension

    cpp_extension.CUDA_HOME = str(home)  # a torch without CUDA does not look for it
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_ARCHITECTURES)
    libraries = {
        "libraries": ["cudart_static", "rt", "pthread", "dl"],
        "library_dirs": [str(home / "lib64")],
    }
    macros = []
    # What of torch's CUDA half is used is weak, and there where libtorch brings it: keep that loaded.
    link = ["-Wl,--no-as-needed", "-ltorch"]
    if links_old_glibc():  # csrc/cuda/glibc.cpp says why
        macros.append(("FASTQT_CUDA_ON_GLIBC", "1"))
        names = re.findall(r"^(?:FIRST|OF_VERSION)\((\w+)", CUDA_GLIBC.read_text(), re.MULTILINE)
        link += [f"-Wl,--wrap={name}" for name in names]

    host = [part for flag in (*hardened, "-fvisibility=hidden") for part in ("-Xcompiler", flag)]
    nvcc = ["-O3", "-std=c++20", "--threads=0", *host, "-Xfatbin", "-compress-all"]
    return CudaBuild(kernels, libraries, nvcc, macros, link)


def native_build() -> dict[str, object]:
    """The arguments of `setup` that build the extension; none where there is to be none."""
    if os.environ.get("FASTQT_PURE") == "1":
        tell_of_absence("FASTQT_PURE=1 asks for none")
        return {}
    if compiler() is None:
        tell_of_absence("there is no C++ compiler")
        return {}
    from torch.utils import cpp_extension

    hardened, link = hardening(cpp_extension.include_paths()[0])
    cuda = cuda_build(hardened)
    extension = cpp_extension.CppExtension(
        "fastqt._C",
        sources=[*sources(".cpp"), *cuda.sources],
        include_dirs=[str(Path("csrc").resolve())],
        depends=[*sources(".h", ".cuh"), str(EXPORTS)],
        define_macros=[
            ("TORCH_TARGET_VERSION", "0x020b000000000000"),
            ("Py_LIMITED_API", "0x030a0000"),
            *cuda.macros,
        ],
        extra_compile_args={"cxx": [*cpu_flags(), *hardened], "nvcc": [*cuda.nvcc]},
        extra_link_args=[*link, *link_flags(), *cuda.link],
        py_limited_api=True,
        **cuda.libraries,
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": tolerant(cpp_extension.BuildExtension)},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


def tolerant(command: type) -> type:
    """The command `build_ext`, after whose failure the package is built as one of Python alone."""

    # torch gives the base without types.
    class BuildExtension(command):  # type: ignore[misc]
        def run(self) -> None:
            try:
                super().run()
            except Exception as error:  # of setuptools, ninja or torch, each of which has its own kinds
                lines = str(error).strip().splitlines() or [type(error).__name__]
                tell_of_absence(f"its compilation failed, see above: {lines[0]}")
                self.extensions = self.distribution.ext_modules = []
                wheel = self.distribution.get_command_obj("bdist_wheel", create=False)
                if wheel is not None:
                    wheel.root_is_pure = True  # so that its name says: for every Python and system

    return BuildExtension


def description() -> str:
    """The README for a package index: without pictures, comments, and links to files of the repository."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*|<!--.*?-->\n?", "", text, flags=re.DOTALL)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


PAGES = {  # of a project: below its address, where a forge has them
    "Homepage": "",
    "Documentation": "/tree/main/docs",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Source": "",
    "Issues": "/issues",
}


def project_urls() -> dict[str, str]:
    """The addresses of a project's pages, for the metadata of packages that are distributed.

    FASTQT_URL is the address of the repository, such as https://example.org/name/fastqt; FASTQT_DOCS_URL is
    that of the built pages, if there is one. Without the first there are none: who distributes a package, of
    this repository or of a fork, says where its users find it.
    """
    url = os.environ.get("FASTQT_URL", "").rstrip("/")
    docs = os.environ.get("FASTQT_DOCS_URL", "").rstrip("/")
    for name, value in (("FASTQT_URL", url), ("FASTQT_DOCS_URL", docs)):
        if value and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value):
            raise SystemExit(f"fastqt: {name}: want an address that begins with https://, got {value!r}")
    urls = {name: url + page for name, page in PAGES.items()} if url else {}
    return {**urls, "Documentation": docs} if docs else urls


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    project_urls=project_urls(),
    **native_build(),
)
