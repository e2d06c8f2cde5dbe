"""A directory is written whole or not at all; torch computes from its files what `fastqt embed` writes."""

import ctypes
import json
import os
import stat
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from fastqt.errors import InputError
from fastqt.sentences.inference import export
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.export import export_run, folder
from fastqt.sentences.inference.export.probes import check_vectors
from tests.sentences.inference.export.conftest import CHECKPOINTS, RUNS
from tests.shared.stored_runs import LINES, write_run

of_bags = pytest.mark.parametrize("run", ["bow"], indirect=True)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@of_bags
def test_an_export_lists_its_files_which_all_can_read(run, tmp_path):
    (tmp_path / "out").mkdir()  # an empty directory is as good as none
    export_run(run, tmp_path / "out", "safetensors")
    about = json.loads((tmp_path / "out/export.json").read_text())
    assert set(about["files"]) == set(contents(tmp_path / "out"))
    assert about["model"] == SentenceEncoder.load(run, with_digest=True).digest
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == {stat.S_IMODE((run / "config.json").stat().st_mode)}
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


@of_bags
def test_a_directory_with_files_is_kept_and_an_export_replaced(run, tmp_path):
    export_run(run, tmp_path / "out", "safetensors")
    before = contents(tmp_path / "out")
    with pytest.raises(InputError, match=r"out: want a new directory, or --overwrite"):
        export_run(run, tmp_path / "out", "safetensors")
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"overwrite: want .*, got notes\.txt in "):
        export_run(run, tmp_path / "out", "safetensors", overwrite=True)
    with pytest.raises(InputError, match=r"overwrite: want .*, got config\.json in "):
        export_run(run, run, "safetensors", overwrite=True)
    assert contents(tmp_path / "out") == before | {"notes.txt": b"mine"}
    (tmp_path / "out/notes.txt").unlink()
    other = write_run(tmp_path / "other", encoder="gru")
    export_run(other, tmp_path / "out", "safetensors", normalize=False, overwrite=True)
    assert not json.loads((tmp_path / "out/encoder.json").read_text())["normalize"]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "other", "out"}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems exchange no names")
def test_at_each_moment_there_is_the_old_export_or_the_new_one_on_the_disk(tmp_path, monkeypatch):
    """A look at each line of the module sees what a crash there would leave."""
    synced, looks, fsync = set(), [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), fsync(file)))

    def export(text):
        with folder.new_folder(tmp_path / "out", {"text": text}) as new:
            (new / "half").mkdir()
            (new / "half/weights").write_text(text)

    def look(frame, event, argument):
        if frame.f_code.co_filename == folder.__file__:
            looks.append(json.loads((tmp_path / "out/export.json").read_text())["text"])
            assert (tmp_path / "out/half/weights").read_text() == looks[-1]
            if looks[-1] == "new":
                inodes = {path.stat().st_ino for path in (tmp_path / "out", *(tmp_path / "out").rglob("*"))}
                assert inodes <= synced
        return look

    export("old")
    synced.clear()
    before = sys.gettrace()
    sys.settrace(look)
    try:
        export("new")
    finally:
        sys.settrace(before)
    assert set(looks) == {"old", "new"}
    assert tmp_path.stat().st_ino in synced  # the directory that holds the name
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_user_has_added_meanwhile_is_kept(tmp_path):
    def export():
        with folder.new_folder(tmp_path / "out", {}):
            (tmp_path / "out").mkdir()
            (tmp_path / "out/notes.txt").write_text("mine")

    with pytest.raises(InputError, match=r"overwrite: want .*, got notes\.txt in "):
        export()
    assert contents(tmp_path / "out") == {"notes.txt": b"mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@of_bags
@pytest.mark.parametrize("moment", ["while it is written", "in its place"])
def test_a_failure_leaves_what_was_there(run, tmp_path, monkeypatch, moment):
    export_run(run, tmp_path / "out", "safetensors")
    before = contents(tmp_path / "out")

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    if moment == "while it is written":
        monkeypatch.setattr(export, "card_text", fail)
    else:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: None)  # a system that cannot exchange names
        rename = type(tmp_path).rename
        monkeypatch.setattr(
            type(tmp_path),
            "rename",
            lambda path, to: fail() if path.suffix == folder.PARTIAL else rename(path, to),
        )
    for out, overwrite in (("out", True), ("new", False)):
        with pytest.raises(OSError, match="No space left"):
            export_run(run, tmp_path / out, "safetensors", overwrite=overwrite)
    assert contents(tmp_path / "out") == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


@of_bags
def test_other_vectors_are_not_written(run):
    """What another library computes differently, even one text alone or one row of NaN, is refused."""
    encoder, differ = SentenceEncoder.load(run, "cpu"), "format: the vectors in x differ from those of this "

    def check(change, width=16):
        def other(texts):
            return encoder.encode(list(texts))[:, :width] + change * (len(texts) == 1)

        check_vectors(encoder, other, normalize=True, format="x")

    check(0.0)
    for change in (1e-4, float("nan")):
        with pytest.raises(InputError, match=differ):
            check(change)
    with pytest.raises(InputError, match=r"gives vectors of shape \(6, 8\), want \(6, 16\)"):
        check(0.0, width=8)


def of_encoder(weights, name):
    """The weights of an encoder or a layer, under the names within it."""
    return {key.removeprefix(f"{name}."): each for key, each in weights.items() if key.startswith(f"{name}.")}


def recurrent(about, weights, words):
    """The final states of torch's own layer, or of the other form of the cell, from its formula."""
    layers = of_encoder(weights, "recurrent")
    if about.get("cell") == "reset-before":
        suffixes = ["l0", "l0_reverse"][: 1 + about["bidirectional"]]
        return torch.cat([reset_before(layers, suffix, words) for suffix in suffixes])
    layer = getattr(nn, about["kind"])(
        words.shape[1], about["width"] // (1 + about["bidirectional"]), bidirectional=about["bidirectional"]
    )
    layer.load_state_dict(layers)
    final = layer(words)[1]
    return (final if about["kind"] == "GRU" else final[0]).flatten()


def reset_before(layers, suffix, words):
    W, U, b, c = (layers[f"{name}_{suffix}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    H = U.shape[1]
    state = torch.zeros(H)
    for word in words.flip(0) if suffix.endswith("reverse") else words:
        inputs, bias = W @ word + b, c
        r, z = torch.sigmoid(inputs[: 2 * H] + U[: 2 * H] @ state + bias[: 2 * H]).chunk(2)
        n = torch.tanh(inputs[2 * H :] + U[2 * H :] @ (r * state) + bias[2 * H :])
        state = n + z * (state - n)
    return state


def transformer(about, weights, words):
    D = words.shape[1]
    layer = nn.TransformerEncoderLayer(
        D, about["heads"], about["feedforward"], norm_first=True, batch_first=True
    )
    layers = nn.TransformerEncoder(layer, about["layers"], nn.LayerNorm(D), enable_nested_tensor=False).eval()
    layers.load_state_dict(of_encoder(weights, "encoder"))
    inputs = D**0.5 * (words + weights["positions.weight"][: len(words)])
    return layers(inputs[None])[0].mean(0)


def vector_of(about, weights, ids):
    """The vector of one sentence, by what encoder.json says of an encoder and by its weights."""
    weights = of_encoder(weights, about["name"])
    words = weights["embedding.weight"][ids]
    if about["kind"] == "sum of word vectors":
        return words.sum(0)
    return (transformer if about["kind"] == "Transformer" else recurrent)(about, weights, words)


@torch.no_grad()
@pytest.mark.thinned(4)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("run", RUNS, indirect=True)
def test_torch_computes_the_same(run, wanted, normalize, tmp_path):
    export_run(run, tmp_path / "out", "safetensors", normalize=normalize)
    about = json.loads((tmp_path / "out/encoder.json").read_text())
    weights = load_file(tmp_path / "out/model.safetensors")
    vocabulary = SentenceEncoder.load(run, "cpu").vocabulary
    for line, expected in zip(LINES, wanted(normalize), strict=True):
        if not line.strip():
            continue
        ids = vocabulary.encode([about["prompts"]["query"] + line.strip()]).ids
        halves = [torch.cat([vector_of(each, weights, ids) for each in half]) for half in about["halves"]]
        vector = torch.cat([F.normalize(half, dim=0) if about["normalize"] else half for half in halves])
        np.testing.assert_allclose(vector, expected, atol=1e-5, rtol=1e-5)
    assert about["normalize"] == normalize
    assert (tmp_path / "out/vocabulary.json").read_bytes() == (run / "vocabulary.json").read_bytes()


@torch.no_grad()
@pytest.mark.parametrize("run", CHECKPOINTS, indirect=True)
def test_transformers_loads_checkpoints(run, wanted, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    export_run(run, tmp_path / "out", "safetensors")
    halves = []
    about = json.loads((tmp_path / "out/encoder.json").read_text())
    prompt = about["prompts"]["query"]
    for (half,) in about["halves"]:
        folder = tmp_path / "out" / half["name"]
        model = transformers.AutoModel.from_pretrained(folder).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        text = prompt + LINES[0]
        output = model(**tokenizer(text, truncation=True, max_length=9, return_tensors="pt"))
        states = output.last_hidden_state[0]
        pooled = {"cls": output.pooler_output[0], "cls_before_pooler": states[0], "mean": states.mean(0)}
        halves.append(F.normalize(pooled[half["pooling"]], dim=0))
    np.testing.assert_allclose(torch.cat(halves), wanted(True)[0], atol=1e-5)
