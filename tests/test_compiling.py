"""`warm_up` compiles what a call of a loss would, on a machine without a GPU."""

import json

import pytest
import torch

import fastqt
from fastqt import compiling, devices
from tests.shared.processes import printed


def test_what_it_compiles_is_what_a_call_would():
    by_loss = json.loads(printed("-m", "tests.shared.warmed", "sources"))
    assert len(by_loss) > 5
    for name, (warmed, called, told) in by_loss.items():
        assert warmed == called, name
        # What an earlier loss of the process has compiled is among what this one launches.
        assert {source.split()[0] for source in warmed} <= set(told), name
    assert {"scale_gradients_kernel", "row_stats_kernel"} < set(by_loss["InfoNCE"][2])


@pytest.mark.slow
def test_a_call_finds_all_of_it_in_the_cache():
    counts = json.loads(printed("-m", "tests.shared.warmed", "cache"))
    assert counts["warmed"] == counts["found"] > 4  # four, and one that scales the gradients
    assert counts["compiled"] == 0


REFUSED = """
import torch, fastqt
for options in ({}, {"target": "sm_3"}, {"backend": "cpu", "target": "sm_90"}):
    try:
        fastqt.warm_up(fastqt.info_nce_loss, (64, 64), (64, 64), **options)
    except (RuntimeError, ValueError) as error:
        print(error)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="wants no GPU")
def test_refuses_what_it_cannot_compile_for():
    no_gpu, unknown, other = printed("-c", REFUSED).splitlines()
    assert no_gpu.startswith(
        "want a GPU to compile for, and torch finds none; name it by target, one of sm_80"
    )
    assert unknown == "target: want one of sm_80, sm_90, sm_100, got 'sm_3'"
    assert other == "backend: want 'triton' or None, whose kernels are compiled, got 'cpu'"


def test_refuses_an_interpreter():
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        fastqt.warm_up(fastqt.info_nce_loss, (64, 64), (64, 64), target="sm_90")


def test_nothing_stands_for_a_gpu_afterwards():
    with pytest.raises(KeyError), devices.described(compiling.TARGETS["sm_90"]):
        raise KeyError if devices.on_gpu(torch.empty(1)) else AssertionError
    assert not devices.is_described()
    assert not devices.on_gpu(torch.empty(1))


def test_inputs_keep_what_code_depends_on():
    given = torch.empty(6, 4, device="meta", requires_grad=True)[::2, :3]
    made = compiling._stand_in(given, torch.float16)
    assert (made.shape, made.stride(), made.dtype) == ((3, 3), (8, 1), torch.float32)
    assert made.is_cpu
    assert made.requires_grad
    assert compiling._stand_in(torch.tensor([5]), torch.float16).tolist() == [5]
    made = compiling._stand_in((2, 3), torch.float16)
    assert (made.shape, made.dtype, made.requires_grad) == ((2, 3), torch.float16, True)
