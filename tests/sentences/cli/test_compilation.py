"""fastqt compile: its options reach `warm_up`, and what is wrong with them is said in a line."""

import pytest
import torch

import fastqt
from fastqt import compiling
from fastqt.compiling import Compiled
from fastqt.sentences.cli import main
from fastqt.sentences.cli.compilation import LOSSES


@pytest.fixture
def calls(monkeypatch):
    """The calls of `warm_up`, which does nothing."""
    made = []

    def warm_up(loss, *shapes, **options):
        made.append((loss, shapes, options))
        return Compiled(("a_kernel",), "sm_90", 2.0)

    monkeypatch.setattr(compiling, "warm_up", warm_up)
    return made


def test_a_call_for_each_number_of_rows(calls, capsys):
    words = ["--rows", "512", "100", "--columns", "700", "--width", "64", "--dtype", "float32"]
    words += ["--target", "sm_90", "--workers", "2", "--option", "memory=low", "--option", "scale=3.5"]
    assert main(["compile", "info_nce", *words]) == 0
    assert [(loss, shapes) for loss, shapes, _ in calls] == [
        (fastqt.info_nce_loss, ((rows, 64), (700, 64))) for rows in (512, 100)
    ]
    options = {"dtype": torch.float32, "target": "sm_90", "workers": 2, "memory": "low", "scale": 3.5}
    assert [given for _, _, given in calls] == [options, options]
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "100 rows: 1 kernel for sm_90 in 2.0 s: a_kernel"


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_takes_what_it_is_given(calls, name):
    assert main(["compile", name, "--rows", "4", "--width", "3"]) == 0
    ((loss, shapes, options),) = calls
    del options["dtype"], options["target"], options["workers"]
    sides = (torch.randn(shape, requires_grad=True) for shape in shapes)
    loss(*sides, **options).backward()
    assert all(x.grad is not None for x in options.values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["info_nce", "--rows", "0"], "--rows: want at least 1, got 0"),
        (["info_nce", "--workers", "-1"], "--workers: want at least 1, got -1"),
        (["info_nce", "--option", "scale"], "--option: want NAME=VALUE, got 'scale'"),
        (["info_nce", "--target", "sm_90"], "unset TRITON_INTERPRET"),
    ],
)
def test_wrong_options_are_told_in_a_line(capsys, words, message):
    assert main(["compile", *words]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.startswith("fastqt: ")
    assert told.count("\n") == 1
