"""Layers of torch.nn load the exported weights by their names, and compute what `fastqt embed` writes."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.export import export_run
from tests.sentences.inference.export.conftest import CHECKPOINTS, RUNS
from tests.shared.stored_runs import LINES


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
