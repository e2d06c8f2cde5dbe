"""The benchmark of GLOSS's inference has the library compute in the shapes that it says."""

import torch

from benchmarks.gloss_inference import Way, measure, shapes_of_the_batch
from fastqt.nn import Gloss, Inference, gloss_inference
from tests.shared.tolerances import FLOAT64, relative


def test_shapes_of_the_batch(monkeypatch):
    """One block of the places of the longest sentence, padded to a multiple of 16 rows; equal vectors."""
    torch.manual_seed(0)
    gloss = Gloss(30, 5, decoder="pos", max_length=40).double()
    tokens, lengths = torch.randint(0, 30, (18, 21)), torch.arange(1, 19)
    shapes, found = [], gloss_inference.factored_pos_loss

    def seen(latents, positions, *others, **options):
        shapes.append((len(latents), len(positions)))
        return found(latents, positions, *others, **options)

    monkeypatch.setattr(gloss_inference, "factored_pos_loss", seen)
    with shapes_of_the_batch(18):
        within = gloss.infer(tokens, lengths, steps=3)
    assert set(shapes) == {(32, 18)}
    shapes.clear()
    outside = gloss.infer(tokens, lengths, steps=3)
    assert set(shapes) == {(32, 16), (32, 32)}
    assert relative(within, outside) < FLOAT64


def test_what_is_measured():
    torch.manual_seed(0)
    gloss = Gloss(30, 5)
    tokens, lengths = torch.randint(1, 30, (16, 4)), torch.full((16,), 4)
    row = measure(gloss, Way(Inference(steps=2), "fixed", torch.float32), tokens, lengths)
    assert (row["decoder"], row["steps"], row["largest_difference"]) == ("bow", 2, 0)
    assert row["mean_loss"] == gloss.loss(gloss.infer(tokens, lengths), tokens, lengths).item()
