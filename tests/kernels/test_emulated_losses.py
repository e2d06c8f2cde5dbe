"""Whole losses on the emulator: the PTX of every kernel executed, in lockstep and with warps in random order.

They run in processes of their own, in which Triton does not interpret.
"""

import functools
import json

import pytest

from tests.shared.processes import printed

# The norm of a gradient's error relative to its own: what two roundings to the dtype come to, that of the
# exponentials and that of the gradient itself. TF32 has 10 bits, to which scores of up to 20 are rounded.
OF_GRADIENTS = {"bfloat16": 3.6e-3, "float16": 6e-4, "float32": 1e-6, "tf32": 1e-3}
OF_LOSSES = 2e-7
ROUNDED_COSINES = {"clip, low": 4e-5}  # float16 takes embeddings that are normalised and rounded before
# Errors of scores are to either side, so that they cancel. They would be 25 to 500 times as large together if
# operands were cut off instead of rounded.
IN_TF32 = {"TF32": 1e-4, "TF32, clip": 3e-4, "TF32, sigmoid": 5e-6}

IN_RANDOM_ORDER = {
    80: ("plain", "groups and mask, low", "cosines", "sigmoid", "maxsim"),
    90: ("plain", "clip", "descriptors", "maxsim"),
}
# Those of tests.shared.emulated_losses, which cannot be imported where Triton interprets, each on one GPU:
# `python -m tests.shared.emulated_losses 80` runs all on one.
ALL = {
    80: (
        *("plain", "single", "deep", "low", "groups and mask", "bias, row negatives", "row scores, listed"),
        *("overflow, negatives", "cosines, sample"),
        *("smoothed", "margin", "cosines", "sigmoid", "clip, low", "released MixCSE, learnt"),
        *("TF32, copied", "TF32, overflow", "TF32, sigmoid", "odd width, copied"),
        *("maxsim, odd width", "maxsim, steps"),
        *("clip, kept", "clip, mask", "clip, margin", "hcl"),
        "guide",
    ),
    90: (
        *("half", "TF32", "TF32, clip", "odd width", "odd width, copied, low", "groups and mask, low"),
        *("negatives, scale", "mixed", "dense", "overflow", "sigmoid, low", "log-sum-exp", "clip"),
        "TF32, log-sum-exp",
        *("margin, cosines, low", "released MixCSE", "descriptors", "descriptors, sigmoid, low"),
        *("maxsim", "maxsim, TF32"),
        *("clip, kept, TF32", "hcl, filtered"),
        "guide, float32",
    ),
}


def lines(*arguments):
    found = printed("-m", "tests.shared.emulated_losses", *map(str, arguments))
    return [json.loads(line) for line in found.splitlines()]


@functools.cache
def results(arch, names, schedule):
    return {result["name"]: result for result in lines(arch, *names, "--schedule", schedule)}


def check(result):
    name, (of_loss, *of_gradients) = result["name"], result["errors"]
    assert result["reports"] == []
    assert result["launches"]
    bound = {**ROUNDED_COSINES, **IN_TF32}.get(name, OF_LOSSES)
    assert of_loss <= max(bound, 1.5 * result["reference"][0])
    for error, reference in zip(of_gradients, result["reference"][1:], strict=True):
        assert error <= max(OF_GRADIENTS[result["dtype"]], 1.5 * reference)
    if result["dtype"] in ("bfloat16", "float16"):
        for error, eager in zip(result["errors"], result["eager"], strict=True):
            assert error <= 1.5 * eager


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "name"), [(arch, name) for arch in ALL for name in ALL[arch]])
def test_all_losses(arch, name):
    check(results(arch, ALL[arch], "lockstep")[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "name"), [(arch, name) for arch in IN_RANDOM_ORDER for name in IN_RANDOM_ORDER[arch]]
)
def test_in_random_order(arch, name):
    check(results(arch, IN_RANDOM_ORDER[arch], "random")[name])


@pytest.mark.slow
def test_all_schedules_of_one_loss():
    """What `make emulate` runs of every loss; the command fails where anything is reported."""
    found = lines(80, "overflow, negatives", "--orders", 1)
    schedules = [(result["schedule"], result["seed"]) for result in found]
    assert schedules == [("lockstep", 0), ("alone", 0), ("random", 0)]
    for result in found:
        check(result)


@pytest.mark.slow  # for the imports of a process
def test_every_loss_is_listed():
    assert sorted(lines("--list")[0]) == sorted(name for names in ALL.values() for name in names)
