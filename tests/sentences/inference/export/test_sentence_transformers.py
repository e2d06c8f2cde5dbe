"""sentence-transformers loads what was exported, with the vectors that `fastqt embed` writes."""

import json

import numpy as np
import pytest
import torch

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.export import export_run
from tests.sentences.inference.export.conftest import CHECKPOINTS, PROMPTS, RUNS, STATIC
from tests.shared.stored_runs import LINES, write_run
from tests.shared.tokenizer_files import word_piece

library = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
WORDS = [bool(line.strip()) for line in LINES]


def loaded(folder, trust=True):
    options = {"device": "cpu", "local_files_only": True, "trust_remote_code": trust}
    return library.SentenceTransformer(str(folder), **options)


def assert_same_vectors(model, wanted, lines=LINES):
    together = model.encode(lines, batch_size=3)
    np.testing.assert_allclose(together, wanted, atol=1e-5, rtol=0)
    for line, vector in zip(lines, wanted, strict=True):
        np.testing.assert_allclose(model.encode(line), vector, atol=1e-5, rtol=0)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("run", [*RUNS, "two checkpoints"], indirect=True)
def test_a_model_of_fastqt(run, wanted, tmp_path):
    width = export_run(run, tmp_path / "out", "sentence-transformers")
    model = loaded(tmp_path / "out")
    assert model.get_embedding_dimension() == width == wanted(True).shape[1]
    assert model.max_seq_length == 9
    assert_same_vectors(model, wanted(True))
    assert np.abs(wanted(True)[WORDS]).max(1).all()


@pytest.mark.parametrize("run", [name for name in CHECKPOINTS if name != "two checkpoints"], indirect=True)
def test_a_checkpoint_needs_no_fastqt(run, wanted, tmp_path):
    """Its modules are the library's own. Only a blank text has another vector, that of [CLS] and [SEP]."""
    export_run(run, tmp_path / "out", "sentence-transformers")
    modules = json.loads((tmp_path / "out/modules.json").read_text())
    assert all(module["type"].startswith("sentence_transformers.") for module in modules)
    lines = [line for line in LINES if line.strip()]
    model = loaded(tmp_path / "out", trust=False)
    assert_same_vectors(model, wanted(True)[WORDS], lines)
    assert model.max_seq_length == 9
    np.testing.assert_allclose(np.linalg.norm(model.encode([""])), 1, rtol=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("run", STATIC, indirect=True)
def test_a_static_embedding_is_the_library_s(run, wanted, tmp_path, normalize):
    export_run(run, tmp_path / "out", "sentence-transformers", normalize=normalize)
    model = loaded(tmp_path / "out", trust=False)
    kinds = [f"{type(module).__module__}.{type(module).__name__}" for module in model]
    package = "sentence_transformers.sentence_transformer.modules.static_embedding"
    assert kinds[0] == f"{package}.StaticEmbedding"
    assert [kind.rpartition(".")[2] for kind in kinds[1:]] == ["Normalize"] * normalize
    # `fastqt embed` removes the white space around a text, of which some tokenizers make tokens.
    assert_same_vectors(model, wanted(normalize), [line.strip() for line in LINES])
    assert np.abs(wanted(False) - wanted(True)).max() > 0.01


def test_a_static_embedding_without_unknown_tokens_is_fastqt_s(tmp_path):
    """The library's has a vector for them."""
    word_piece().save(str(tmp_path / "tokenizer.json"))
    settings = {"model": "pairs", "encoder": "static", "corpus": ("x.tsv",), "unknown": "drop", **PROMPTS}
    run = write_run(tmp_path / "run", vocabulary=str(tmp_path / "tokenizer.json"), **settings)
    export_run(run, tmp_path / "out", "sentence-transformers")
    model, texts = loaded(tmp_path / "out"), ["a cat ☃ sat", "words"]
    np.testing.assert_allclose(model.encode(texts), SentenceEncoder.load(run).encode(texts), atol=1e-5)


@pytest.mark.parametrize("run", ["pairs", "pairs of a checkpoint"], indirect=True)
def test_prompts_of_documents(run, tmp_path):
    export_run(run, tmp_path / "out", "sentence-transformers")
    model, encoder = loaded(tmp_path / "out"), SentenceEncoder.load(run, "cpu")
    texts = ["the cat", "sat"]
    documents = encoder.encode(texts, side="document")
    np.testing.assert_allclose(model.encode_document(texts), documents, atol=1e-5)
    np.testing.assert_allclose(model.encode_query(texts), encoder.encode(texts), atol=1e-5)
    assert np.abs(documents - encoder.encode(texts)).max() > 0.01


@pytest.mark.parametrize("run", ["gru", "mean"], indirect=True)
def test_raw_vectors(run, wanted, tmp_path):
    export_run(run, tmp_path / "out", "sentence-transformers", normalize=False)
    lines = [line for line in LINES if line.strip()]
    assert_same_vectors(loaded(tmp_path / "out"), wanted(False)[WORDS], lines)
    assert np.abs(wanted(False) - wanted(True)).max() > 0.01


def test_the_module_is_trained_and_saved(tmp_path):
    """Gradients reach both encoders; what the library saves again has the vectors of the trained weights."""
    export_run(write_run(tmp_path / "run", encoder="gru"), tmp_path / "out", "sentence-transformers")
    model = loaded(tmp_path / "out").train()
    before = model.encode(["the cat sat"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    vectors = model(model.preprocess(["the cat sat", "a dog", ""]))["sentence_embedding"]
    vectors.square()[:, 0].sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "query" in name)
    optimizer.step()
    trained = model.encode(["the cat sat"])
    assert np.abs(trained - before).max() > 0.01
    model.save_pretrained(str(tmp_path / "again"))
    np.testing.assert_allclose(loaded(tmp_path / "again").encode(["the cat sat"]), trained, atol=1e-6)


def test_what_is_no_text_or_no_export_or_not_trusted_is_refused(tmp_path):
    """The library wants the trust, in words that the FAQ repeats, though there is no code in the folder."""
    export_run(write_run(tmp_path / "run"), tmp_path / "out", "sentence-transformers")
    with pytest.raises(ValueError, match="trust_remote_code"):
        loaded(tmp_path / "out", trust=False)
    assert [path.name for path in tmp_path.rglob("*.py")] == []
    model = loaded(tmp_path / "out")
    with pytest.raises(TypeError, match=r"inputs: want texts, got"):
        model.encode([("a", "b")])
    (tmp_path / "out/fastqt_encoder.json").write_text('{"normalize": 1}')
    with pytest.raises(InputError, match="normalize"):
        loaded(tmp_path / "out")
    (tmp_path / "out/fastqt_encoder.json").unlink()
    with pytest.raises(InputError, match=r"no exported model: .*fastqt_encoder\.json is missing"):
        loaded(tmp_path / "out")
