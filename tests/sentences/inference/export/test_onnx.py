"""onnxruntime computes from the exported file what `fastqt embed` writes, for batches of all shapes."""

import json

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.nn import BagOfWords
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.export import export_run, onnx_file
from fastqt.sentences.inference.halves import tokens_of
from fastqt.sentences.runs.encoders import BagOfWordsForm
from tests.shared.stored_runs import LINES, write_run
from tests.shared.tokenizer_files import word_piece

for name in ("onnx", "onnxscript"):
    pytest.importorskip(name, reason="the extra onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
# Each kind of encoder once, since an export takes seconds; how they are composed, the other formats test too.
KINDS = ("bigru, reset-before", "bilstm", "transformer", "two channels", "pairs", "pooler", "two checkpoints")
KINDS += ("static, bpe",)
QUICK = ("bigru, reset-before",)


def session_of(folder):
    return onnxruntime.InferenceSession(str(folder / "model.onnx"))


def vectors(session, tokens, lengths, padding=0):
    """Of token ids (B, L), whose padding is replaced."""
    mask = np.arange(tokens.shape[1]) < lengths[:, None]
    ids = np.where(mask, tokens, padding)
    return session.run(None, {"input_ids": ids, "attention_mask": mask.astype(np.int64)})[0]


def assert_same_vectors(folder, run, wanted):
    """Of all lines together, with any ids as padding, and of one line alone."""
    session = session_of(folder)
    encoder = SentenceEncoder.load(run, "cpu")
    texts = tokens_of(encoder.vocabulary, LINES, encoder.prompts.query)
    tokens, lengths = (tensor.numpy() for tensor in texts)
    for padding in (0, 10**9):
        np.testing.assert_allclose(vectors(session, tokens, lengths, padding), wanted, atol=1e-5, rtol=0)
    for row, length in enumerate(lengths):
        one = tokens[row : row + 1, : max(length, 1)], lengths[row : row + 1]
        np.testing.assert_allclose(vectors(session, *one), wanted[row : row + 1], atol=1e-5, rtol=0)


each_kind = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in KINDS]


@pytest.mark.parametrize("run", each_kind, indirect=True)
def test_a_model_has_the_vectors_of_embed(run, wanted, tmp_path):
    export_run(run, tmp_path / "out", "onnx")
    assert_same_vectors(tmp_path / "out", run, wanted(True))


@pytest.mark.slow
@pytest.mark.parametrize("run", ["gru"], indirect=True)
def test_raw_vectors_with_the_weights_in_a_second_file(run, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_file, "ONE_FILE", 0)
    export_run(run, tmp_path / "out", "onnx", normalize=False)
    assert (tmp_path / "out/model.onnx.data").exists()
    assert_same_vectors(tmp_path / "out", run, wanted(False))


class HostDependent(BagOfWords):
    """An encoder that asks for values while it is traced, as some checkpoints do."""

    def forward(self, tokens, lengths):
        return super().forward(tokens, lengths) if int(tokens.sum()) else super().forward(tokens, lengths * 2)


@pytest.mark.slow
def test_what_torch_cannot_export_is_an_error_in_words(tmp_path, monkeypatch, capfd):
    run = write_run(tmp_path / "run")
    monkeypatch.setattr(BagOfWordsForm, "graph", lambda *_: HostDependent(50, 8))
    with pytest.raises(InputError, match=r"format: torch cannot export this encoder to onnx: "):
        export_run(run, tmp_path / "out", "onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert not capfd.readouterr().err


def usage(folder):
    """The block of Python in a card."""
    return (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["words", "sub-words"])
def test_the_card_says_how_texts_become_ids(tokens, tmp_path, monkeypatch):
    """Its code gives the vectors of `fastqt embed` for its own two texts."""
    settings = {}
    if tokens == "sub-words":
        word_piece().save(str(tmp_path / "tokenizer.json"))
        settings = {"vocabulary": str(tmp_path / "tokenizer.json")}
    run = write_run(tmp_path / "run", **settings)
    export_run(run, tmp_path / "out", "onnx")
    monkeypatch.chdir(tmp_path / "out")
    names = {}
    exec(usage(tmp_path / "out"), names)
    texts = ["a sentence", "another one"]
    np.testing.assert_allclose(names["vectors"], SentenceEncoder.load(run).encode(texts), atol=1e-5)
    assert "The training put" not in (tmp_path / "out/README.md").read_text()
    assert json.loads((tmp_path / "out/export.json").read_text())["format"] == "onnx"
