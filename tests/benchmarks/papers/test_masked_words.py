"""The training on masked words masks as BERT does, and goes on where it was stopped."""

import json
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the extra hf is not installed")

from benchmarks.papers import masked_words
from benchmarks.papers.masked_words import CLS, MASK, SEP, SPECIAL, V, masked, pieces, rate


def test_the_rates_of_masks():
    tokens = torch.randint(len(SPECIAL), V, (400, 500), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = CLS
    batch = masked(tokens, seed=1)
    assert not batch.chosen[:, 0].any()
    assert torch.equal(batch.wanted, tokens[batch.chosen])
    assert torch.equal(batch.tokens[~batch.chosen], tokens[~batch.chosen])
    seen = batch.tokens[batch.chosen]
    shares = {
        "chosen": batch.chosen[:, 1:].double().mean(),
        "masked": (seen == MASK).double().mean(),
        "kept": (seen == batch.wanted).double().mean(),
    }
    # Five standard deviations of a share of 30,000 tokens.
    assert {name: float(share) for name, share in shares.items()} == pytest.approx(
        {"chosen": 0.15, "masked": 0.8, "kept": 0.1}, abs=5 * (0.25 / 30_000) ** 0.5
    )


def test_pieces_have_the_text_between_their_ends():
    ids = np.arange(5, 5 + 200, dtype=np.uint16)
    rows = pieces(ids)
    assert rows.shape == (200 // (masked_words.LENGTH - 2), masked_words.LENGTH)
    assert (rows[:, 0] == CLS).all()
    assert (rows[:, -1] == SEP).all()
    assert rows[:, 1:-1].flatten().tolist() == ids[: rows.numel() - 2 * len(rows)].tolist()


def test_the_rate_rises_and_falls_to_nothing():
    steps = [rate(step, 1000) for step in range(1, 1001)]
    peak = int(np.argmax(steps)) + 1
    assert steps[0] == 1 / masked_words.WARM_UP
    assert abs(peak - masked_words.WARM_UP) <= 1
    assert steps[-1] == 0


@pytest.mark.slow
def test_a_stopped_training_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    for name, value in (("V", 60), ("LENGTH", 12), ("BATCH", 4), ("WIDTH", 16), ("LAYERS", 1), ("HEADS", 2)):
        monkeypatch.setattr(masked_words, name, value)
    monkeypatch.setattr(masked_words, "STORED", tmp_path / "stored.json")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the cat saw the number {n} and {n % 7} dogs ." for n in range(300)))
    given = [str(text)], str(text)
    stop = masked_words.rate

    def stopping(step, steps):
        if step == 5:
            raise RuntimeError
        return stop(step, steps)

    monkeypatch.setattr(masked_words, "rate", stopping)
    with pytest.raises(RuntimeError):
        masked_words.train(*given, tmp_path / "stopped", steps=6, report_every=2)
    monkeypatch.setattr(masked_words, "rate", stop)
    # The training of word pieces breaks ties at random.
    (tmp_path / "whole").mkdir()
    for made in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "stopped" / made, tmp_path / "whole")
    found = []
    for name in ("stopped", "whole"):
        masked_words.train(*given, tmp_path / name, steps=6, report_every=2)
        stored = json.loads((tmp_path / "stored.json").read_text())
        found.append((stored["sha256"], [line["validation_loss"] for line in stored["log"]]))
    assert found[0] == found[1]
