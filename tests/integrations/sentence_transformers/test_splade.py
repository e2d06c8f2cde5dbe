"""A SPLADE model of the library has its vectors, gradients and files with the pooling of fastqt too."""

import copy
import json
import pickle
import re

import pytest
import torch

from tests.shared.tiny_bert import WORDS
from tests.shared.tolerances import FLOAT32, relative

st = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

# The libraries can be imported after the skips alone.
from sentence_transformers import SparseEncoder  # noqa: E402
from sentence_transformers.sparse_encoder import losses  # noqa: E402
from sentence_transformers.sparse_encoder.modules import SpladePooling  # noqa: E402

import fastqt  # noqa: E402
from fastqt.integrations.sentence_transformers import pool_without_logits  # noqa: E402

TEXTS = ["the cat sat on a mat .", "cats", "a cat .", "the mat"]
SIZES = {"vocab_size": len(WORDS), "max_position_embeddings": 32}
KINDS = {
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, **SIZES
        )
    ),
    "distilbert": lambda: transformers.DistilBertForMaskedLM(
        transformers.DistilBertConfig(dim=8, n_layers=1, n_heads=2, hidden_dim=16, **SIZES)
    ),
    "roberta": lambda: transformers.RobertaForMaskedLM(
        transformers.RobertaConfig(
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            pad_token_id=0,
            **SIZES,
        )
    ),
}


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    torch.manual_seed(0)
    model = KINDS[request.param]()
    for name, x in model.named_parameters():
        if name.endswith("bias"):  # which are 0 at first
            torch.nn.init.normal_(x)
    model.save_pretrained(tmp_path)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(tmp_path)
    return tmp_path


def loaded(folder, activation="relu"):
    model = SparseEncoder(str(folder), device="cpu", local_files_only=True)
    model[1].activation_function = activation
    return model


def vectors(model):
    return model(model.preprocess(TEXTS))["sentence_embedding"]


def gradients(model):
    """Those of a sum of the vectors' numbers with weights, by the names of parameters."""
    model.eval()  # without dropout
    model[1].train()  # which outside of training writes to what gradients are computed from
    model.zero_grad()
    upstream = torch.randn(len(TEXTS), len(WORDS), generator=torch.Generator().manual_seed(1))
    (vectors(model) * upstream).sum().backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_vectors_and_gradients_are_the_librarys(folder, activation):
    model = loaded(folder, activation)
    wanted, wanted_gradients = vectors(model.eval()).detach(), gradients(model)
    pool_without_logits(model)
    pool_without_logits(model)  # which changes nothing
    states = model[0](model.preprocess(TEXTS))["token_embeddings"]
    assert states.shape[2] == 8  # and no logits
    assert relative(vectors(model).detach(), wanted) < FLOAT32
    found = gradients(model)
    assert found.keys() == wanted_gradients.keys()
    most = max(gradient.abs().max() for gradient in wanted_gradients.values())
    for name, gradient in found.items():  # Those of an attention's keys have biases without a gradient.
        assert (gradient - wanted_gradients[name]).abs().max() < FLOAT32 * most, name


def test_files_are_the_librarys(folder, tmp_path):
    model = loaded(folder)
    wanted, names = vectors(model.eval()).detach(), list(model.state_dict())
    for _ in range(2):  # The first time settles what the similarity is.
        model.save(str(tmp_path / "before"))
    pool_without_logits(model)
    assert list(model.state_dict()) == names
    model.save(str(tmp_path / "after"))
    for path in (tmp_path / "before").rglob("*.json"):
        other = tmp_path / "after" / path.relative_to(tmp_path / "before")
        assert json.loads(other.read_text()) == json.loads(path.read_text()), path.name
    again = loaded(tmp_path / "after").eval()
    assert type(again[1]) is SpladePooling
    assert relative(vectors(again).detach(), wanted) < FLOAT32


def test_copies_pool_by_weights_of_their_own(folder):
    model = loaded(folder).eval()
    pool_without_logits(model)
    wanted = vectors(model).detach()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(vectors(other), wanted)
        with torch.no_grad():
            other[0].model.get_output_embeddings().weight.zero_()
        assert not torch.equal(vectors(other), wanted)
        assert torch.equal(vectors(model), wanted)


def test_texts_without_padding(folder):
    model = loaded(folder).eval()
    pool_without_logits(model)
    features = model[0](model.preprocess(TEXTS))
    wanted = model[1](dict(features))["sentence_embedding"]
    mask = features["attention_mask"].bool()
    flat = {
        "token_embeddings": features["token_embeddings"][mask][None],
        "cu_seq_lens_q": torch.cat([torch.zeros(1, dtype=torch.long), mask.sum(1).cumsum(0)]),
    }
    assert relative(model[1](flat)["sentence_embedding"], wanted) < FLOAT32


def test_the_regulariser_is_the_librarys():
    """Of numbers that come from a relu, which has no gradient where they are 0."""
    x = torch.randn(6, 20, generator=torch.Generator().manual_seed(0)).requires_grad_()
    theirs = losses.FlopsLoss(None).compute_loss_from_embeddings(x.relu())
    ours = fastqt.flops_loss(x.relu())
    assert relative(ours, theirs) < FLOAT32
    assert relative(*(torch.autograd.grad(loss, x)[0] for loss in (ours, theirs))) < FLOAT32


def test_other_models_are_refused(folder):
    with pytest.raises(TypeError, match="model: want a SparseEncoder, got Linear"):
        pool_without_logits(torch.nn.Linear(2, 2))
    model = loaded(folder)
    model[1].pooling_strategy = "sum"
    with pytest.raises(ValueError, match="model: want the pooling_strategy 'max', got 'sum'"):
        pool_without_logits(model)
    of_states = SparseEncoder(modules=[loaded(folder)[0]], device="cpu")
    with pytest.raises(
        TypeError, match="model: want a masked language model and SpladePooling, got Transformer"
    ):
        pool_without_logits(of_states)


def test_a_model_that_changes_its_logits_is_refused(folder):
    model = loaded(folder)
    wanted = vectors(model.eval()).detach()
    language_model = model[0].model
    forward = language_model.forward

    def doubled(*arguments, **options):
        output = forward(*arguments, **options)
        output.logits = 2 * output.logits
        return output

    language_model.forward = doubled
    with pytest.raises(ValueError, match=re.escape("model: want logits that are the decoder's output")):
        pool_without_logits(model)
    language_model.forward = forward
    assert torch.equal(vectors(model), wanted)
