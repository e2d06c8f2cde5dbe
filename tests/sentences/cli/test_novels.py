"""Models are trained on a real novel by the command, learn, and embed text that they have not seen."""

import json
from pathlib import Path

import numpy as np
import pytest

from fastqt.sentences.cli import main
from fastqt.sentences.inference.encoder import SentenceEncoder
from tests.shared.novels import novel

SMALL = ["--word-dim", "16", "--vocab-size", "500", "--batch-size", "50", "--learning-rate", "0.01"]
MODELS = {
    "quickthoughts": ["--encoder", "bow"],
    "simcse": ["--encoder", "bow", "--dropout", "0.3"],
    "skip-thoughts": ["--hidden-size", "24", "--valid-batches", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_model_learns_from_a_novel(model, tmp_path):
    corpus, held_out = (
        novel(tmp_path / name, lines, first=first)
        for name, lines, first in (("text.txt", 600, 0), ("held_out.txt", 150, 600))
    )
    run, out = tmp_path / "run", tmp_path / "x.npy"
    command = ["train", corpus, "--out", str(run), "--model", model, "--valid", held_out, "--epochs", "2"]
    assert main([*command, *SMALL, *MODELS[model], "--report-every", "1"]) == 0
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if step["step"]]  # without that of fresh weights
    name = "loss_per_word" if model == "skip-thoughts" else "loss"
    assert steps[-1][name] < 0.95 * steps[0][name]

    assert main(["embed", str(run), held_out, "--out", str(out)]) == 0
    vectors = np.load(out)
    full = np.array([bool(line.strip()) for line in Path(held_out).read_text().splitlines()])
    assert len(vectors) == 150
    norms = np.linalg.norm(vectors[full], axis=1)  # of quickthoughts, the two encoders' beside each other
    np.testing.assert_allclose(norms, 2**0.5 if model == "quickthoughts" else 1, rtol=1e-5)
    assert len(SentenceEncoder.load(run, "cpu").vocabulary) == 500
