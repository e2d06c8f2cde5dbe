"""Triton kernels that do not compile. To be imported where Triton does not interpret."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.gpu.sections import Verdict


@triton.jit
def inner(x):
    return x + undefined_name  # noqa: F821


@triton.jit
def undefined_kernel(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), inner(tl.load(x + tl.arange(0, N))))


@triton.jit
def unknown_instruction_kernel(x, N: tl.constexpr):
    value = tl.load(x + tl.arange(0, N))
    value = tl.inline_asm_elementwise("no.such.f32 $0, $1;", "=f,f", [value], tl.float32, True, 1)
    tl.store(x + tl.arange(0, N), value)


def compiled(kernel) -> Verdict:
    source = ASTSource(fn=kernel, signature={"x": "*fp32", "N": "constexpr"}, constexprs={(1,): 128})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    return Verdict(True, "")
