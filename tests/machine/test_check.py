"""fastqt check: it passes where engines are right, and fails where one of them is not."""

import itertools
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fastqt.engines import ENGINES, Engine
from fastqt.engines.chunked import contrastive
from fastqt.machine import cases, check, times, verdicts
from fastqt.machine.verdicts import Question, Truths, answer
from fastqt.problem import Problem
from fastqt.sentences.cli import main
from tests.shared.processes import printed

CPU = torch.device("cpu")
QUICK = ["check", "--quick", "--device", "cpu"]


def planted(spoil, only=lambda p: True) -> Engine:
    """The engine of torch's operations, with gradients that `spoil` changes in some problems."""

    def changed(function):
        def run(p, *args):
            value = function(p, *args)
            if not only(p):
                return value
            if function is contrastive.forward_with_gradients:
                return value[0], value[1]._replace(queries=spoil(value[1].queries))
            return value._replace(queries=spoil(value.queries))

        return run

    functions = {name: getattr(contrastive, name) for name in ("gradients_in_forward", "forward")}
    for name in ("forward_with_gradients", "backward"):
        functions[name] = changed(getattr(contrastive, name))
    module = SimpleNamespace(**functions)
    return replace(
        ENGINES["torch"], name="planted", of_kind=lambda p: module if isinstance(p, Problem) else None
    )


def test_right_engines_pass_and_a_table_is_printed(capsys, tmp_path):
    path = tmp_path / "check.json"
    assert main([*QUICK, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    stored = json.loads(path.read_text())
    assert stored["right"] is True
    assert stored["faults"] == []

    usable = verdicts.usable_engines(CPU)
    assert {"torch", "reference"} <= set(usable)
    for engine, dtype in itertools.product(usable, ("float32", "bfloat16", "float16")):
        row = re.search(rf"^  {engine} +{dtype} +(\d+) +0 +0 +0 +(0\.\d\d)$", out, re.MULTILINE)
        assert row is not None, out
        checks = [c for c in stored["checks"] if (c["engine"], c["dtype"]) == (engine, dtype)]
        assert int(row[1]) == len(checks) >= 15
        assert {c["memory"] for c in checks} == {"fast", "low"}
    for name in ("eager", "fastqt", "fastqt, memory=low"):
        assert len(re.findall(rf"^  (InfoNCE|CLIP) +{name} +[\d.,]+ ", out, re.MULTILINE)) == 2
    assert re.search(r"^Nothing is wrong: \d+ checks passed\.$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("spoil", "only"),
    [
        (lambda gradient: gradient * 1.02, lambda p: True),
        (lambda gradient: gradient.index_fill(0, torch.tensor([0]), 0.0), lambda p: p.memory == "low"),
        (lambda gradient: gradient * float("nan"), lambda p: p.negatives is not None),
        (lambda gradient: gradient[: 1 << 40, None], lambda p: True),
    ],
    ids=["2 % too large", "a row forgotten, with little memory", "NaN with negatives", "raises"],
)
def test_a_wrong_engine_is_found(spoil, only, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(ENGINES, "planted", planted(spoil, only))
    path = tmp_path / "check.json"
    assert main([*QUICK, "--json", str(path)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^WRONG: on cpu, \d+ of \d+ checks failed, of the engines: planted\.$", out, re.M)
    assert "FASTQT_BACKEND=reference" in out
    assert "Nothing is wrong" not in out

    stored = json.loads(path.read_text())
    assert stored["right"] is False
    assert {c["engine"] for c in stored["checks"] if c["status"] == "wrong"} == {"planted"}


def test_what_is_not_reached_is_told(capsys, monkeypatch):
    """The time is over after a few answers, or at once."""
    clock = itertools.chain([0.0] * 6, itertools.repeat(1e9))
    for module in (check, times):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert main(QUICK) == 0
    out = capsys.readouterr().out
    assert re.search(r"Nothing is wrong: \d checks passed\. \d+ were not reached in this time; --sec", out)
    assert out.count(times.LATE) == 6

    clock = itertools.chain([0.0], itertools.repeat(1e9))
    assert main(QUICK) == 1
    assert "WRONG: nothing was checked on cpu, because the time was over" in capsys.readouterr().out


COMPILED = """
from dataclasses import replace
import torch
from fastqt.machine import cases, check, verdicts
from tests.shared.warmed import compiling_by

def refuses(**inputs):
    raise RuntimeError

sources = []
with compiling_by(lambda source, target, options: sources.append(source.fn.__name__)):
    for case in (replace(cases.QUICK_CASES[0], loss=refuses), *cases.QUICK_CASES):
        asked = list(verdicts.questions(torch.device("cuda"), ["triton", "torch"], [case], verdicts.DTYPES))
        before = len(sources)
        check.compile_kernels(torch.device("cuda"), asked, target="sm_90")
        print(case.loss is refuses, len(sources) - before, "scores_kernel" in sources[before:])
"""


def test_the_kernels_of_a_case_are_compiled_before_it_is_asked_about():
    """Each kind of each kernel once, also where another case has an error."""
    refused, *by_case = printed("-c", COMPILED).splitlines()
    assert refused == "True 0 False"
    assert len(by_case) == len(cases.QUICK_CASES)
    for line in by_case:
        raises, count, has_scores = line.split()
        assert (raises, has_scores) == ("False", "True")
        assert int(count) > 5


def test_converged_inputs_are_converged():
    for case in cases.CASES:
        if "converged" in case.name:
            rows = case.formula(**{name: x.double() for name, x in case.make().items()})
            assert rows.max() < 1e-6
            assert rows.min() > 0


def test_a_device_without_a_dtype_is_not_blamed_on_an_engine(monkeypatch):
    def none(**_):
        raise NotImplementedError('"addmm" not implemented for Half')

    def formula(**x):
        return none() if x["queries"].dtype is torch.float16 else cases.of_window(**x)

    case = replace(cases.QUICK_CASES[0], formula=formula)
    verdict = answer(Question(CPU, "torch", case, torch.float16, "fast", "sum"), Truths())
    assert verdict.status == "refused"
    assert "eager PyTorch does not compute it" in verdict.message


def test_a_loss_without_memory_is_told_in_the_table(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("out of memory\nTried to allocate 1 TiB")

    monkeypatch.setattr(times, "of_clip", refuse)
    measurements = times.measure(CPU, quick=True)
    (row,) = [line for line in times.lines(measurements) if "CLIP     eager" in line]
    assert row.endswith("-        -  RuntimeError: out of memory")
