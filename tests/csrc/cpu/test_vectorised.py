"""The compilers make vector instructions of the passes over floats, and no calls of scalar functions."""

import re
import subprocess

import pytest

from tests.csrc import building
from tests.csrc.cpu.processors import OPTIMISED, Processor, level

SOURCES = ("row_passes", "gru_rows")
BUILDS = {
    **{f"{compiler}, {name}": (Processor(compiler, level(name)), name)
       for compiler in ("g++", "clang") for name in ("x86-64", "x86-64-v3", "x86-64-v4")},
    "g++, arm64": (Processor("cross"), "arm64"),
    "clang, arm64": (Processor("clang", ("--target=aarch64-linux-gnu",)), "arm64"),
}  # fmt: skip
# Arithmetic on whole registers of a processor. Instructions that also move and mask a single float are not
# listed. clang prefers registers of 256 bits where there are wider ones.
OF_X86 = r"v?(?:(?:add|sub|mul|div|max|min|cmp\w*|fn?m\w+)p[sd]|p(?:add|sub|cmp|sll|srl)\w+)\s.*%{}"
VECTORS = {
    "x86-64": OF_X86.format("xmm"),
    "x86-64-v3": OF_X86.format("ymm"),
    "x86-64-v4": OF_X86.format("[yz]mm"),
    "arm64": r"(?:f(?:add|sub|mul|mla|mls|div|max|min|cm)\w*|cmeq|shll?|ushll)\s+v\d+\.(?:4s|2d)",
}
# SSE2 does not compare integers of 64 bits. clang composes that of other instructions; GCC's loop is scalar.
SCALAR = {("g++, x86-64", "row_exclude_group")}
SCALAR_FUNCTION = r"(?:callq?|jmp|bl?)\s+\w*(?:exp|log|tanh)\w*(?:@PLT)?$"


def of_floats(assembly: str) -> dict[str, str]:
    """The text of each pass over floats in the output of a compiler, by its mangled name."""
    parts = re.split(r"^(_ZN6fastqt\w+):", assembly, flags=re.MULTILINE)
    functions = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {
        name: text
        for name, text in functions.items()
        if re.search(r"(?:row_|_row)\w*EPK?(?:f|NS_8BFloat16)", name)
    }


def declared(source: str) -> int:
    header = (building.ROOT / f"csrc/cpu/{source}.h").read_text()
    return len(re.findall(r"^\w+ \w+\((?:const )?(?:float|BFloat16)\*", header, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("build", BUILDS)
def test_every_pass_over_floats_has_vectors_of_its_processor(build, source):
    processor, vectors = BUILDS[build]
    if (reason := processor.why_not(runs=False)) is not None:
        pytest.skip(reason)
    command = [processor.command(), *OPTIMISED, *processor.flags, "-S", "-o", "-", f"csrc/cpu/{source}.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=building.ROOT)
    assert done.returncode == 0, done.stderr
    found = of_floats(done.stdout)
    assert len(found) == declared(source)
    for name, text in found.items():
        instructions = [line.strip() for line in text.splitlines()]
        assert not any(re.match(SCALAR_FUNCTION, each) for each in instructions), name
        scalar = any(build == one and function in name for one, function in SCALAR)
        assert any(re.match(VECTORS[vectors], each) for each in instructions) != scalar, name
