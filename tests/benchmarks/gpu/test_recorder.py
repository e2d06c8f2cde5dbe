"""What is kept of launches and operators, so that a failure can be understood."""

import os
import time

import torch
from torch.nn import Parameter

from benchmarks.gpu import recorder
from benchmarks.gpu.recorder import described, recorded_check, recording
from benchmarks.gpu.sections import Verdict
from benchmarks.gpu.smoke.scores import DRY_SIZES, LAUNCHES, make_inputs, make_outputs
from fastqt.kernels.launch import Config
from fastqt.kernels.scores import Tile

CPU = torch.device("cpu")


def test_a_tensor_is_told_by_dtype_shape_strides_place_and_alignment():
    x = Parameter(torch.zeros(4, 6))
    assert described(x) == f"float32 (4, 6), strides (6, 1), cpu, address % 16 = {x.data_ptr() % 16}"
    view = x.detach()[1:, 1::2]
    assert described(view).startswith("float32 (3, 3), strides (6, 2), cpu, address % 16 = ")
    assert described([view, 3]) == f"[{described(view)}, 3]"
    assert described(None) == "None"


def test_the_last_launches_are_kept_each_once():
    inputs = make_inputs(DRY_SIZES, torch.float16, CPU)
    config = Config(16, 32, 16, 2)
    out = make_outputs(DRY_SIZES, torch.float16, CPU, config)
    with recording() as found:
        for epilogue in ("EXP", "EXP", "SIGMOID"):
            LAUNCHES[epilogue](Tile(0, DRY_SIZES[0], inputs.candidates), inputs, out, config)
    first, second = found.evidence()["launches"]
    assert (first["name"], first["arguments"]["EPILOGUE"]) == ("scores_kernel", "EXP")
    assert second["arguments"]["EPILOGUE"] == "SIGMOID"
    assert first["arguments"]["candidates"] == described(inputs.candidates)
    assert first["grid"] == "(4,)"


def test_operators_are_kept_where_they_are_asked_for():
    x = torch.ones(2, 3)
    with recording() as without, recording(operators=True) as found:
        torch.addmm(torch.zeros(2, 2), x, x.T, beta=0)
    assert not without.launches
    last = found.launches[-1]
    assert last["name"] == "aten.addmm.default"
    assert last["arguments"]["2"].startswith("float32 (3, 2), strides (1, 3), cpu")
    assert last["arguments"]["beta"] == "0"


def test_a_failure_has_the_files_that_triton_wrote_last(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compiles(name, ending, text):
        folder = tmp_path / name
        folder.mkdir()
        for suffix in (".ttir", ".ttgir", ending):
            (folder / f"kernel{suffix}").write_text(text)
        now = time.time() + len(list(tmp_path.iterdir()))
        for path in folder.iterdir():
            os.utime(path, (now, now))

    def fails(*compilations):
        for arguments in compilations:
            compiles(*arguments)
        return Verdict(False, "wrong")

    compiles("before", ".ptx", "old")
    none = recorded_check("x", lambda: fails())
    assert none["evidence"]["compiled"] == {}
    long = "begin " + recorder.MOST_OF_A_DUMP * "." + " end"
    record = recorded_check("x", lambda: fails(("a", ".ptx", "other"), ("b", ".ptx", long)))
    dumped = record["evidence"]["compiled"]
    assert set(dumped) == {"kernel.ttgir", "kernel.ptx"}
    assert dumped["kernel.ptx"].startswith("begin ")
    assert dumped["kernel.ptx"].endswith(" end")
    assert "evidence" not in recorded_check("x", lambda: Verdict(True, ""))
