"""The loss allocates little beside its inputs and gradients, and never a matrix of N x N scores."""

import subprocess
import sys

import pytest

MEASURE = """
import resource, torch, fastqt
N, D, options = {N}, {D}, {options!r}
def peak():  # bytes; Linux counts KiB, macOS bytes
    import sys
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
small = torch.randn(64, D, requires_grad=True)
fastqt.contrastive_loss(small, small.detach(), **options).backward()  # loads what is loaded once
queries, candidates = (torch.randn(N, D).mul_(0.1).requires_grad_() for _ in range(2))
grown = torch.ones(2 * N * D)  # the gradients' share, touched
before = peak()
del grown
fastqt.contrastive_loss(queries, candidates, **options).backward()
print(peak() - before)
"""


def peak_above_inputs_and_gradients(N, D, **options):
    """In a process of its own, in which no other test has left free memory."""
    script = MEASURE.format(N=N, D=D, options=options)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("memory", ["fast", "low", 2**24, 2**30])
@pytest.mark.thinned(4)
def test_peak_memory_above_inputs_and_gradients(memory, backend):
    """At N = 8,192 the score matrix alone would take 256 MiB."""
    assert peak_above_inputs_and_gradients(8192, 32, memory=memory, backend=backend) <= 64 * 2**20


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.slow
def test_peak_memory_of_many_rows(backend):
    """Where the score matrix alone would take 1 GiB."""
    assert peak_above_inputs_and_gradients(16384, 128, backend=backend) <= 64 * 2**20
