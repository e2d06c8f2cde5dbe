"""Options of SimCSE and MixCSE that a model or a form does not have are refused, and the others reach it."""

import pytest

from fastqt.errors import InputError
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import build_model

RELEASED = {"model": "mixcse", "form": "released"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "simcse", "partner": "random"}, "partner: want 'next' with model simcse, got 'random'"),
        ({"stop_gradient": "no"}, "stop_gradient: want 'yes' with model quickthoughts, got 'no'"),
        (
            {"model": "mixcse", "blocks": "candidates"},
            "blocks: want 'both' with form slides of mixcse, got 'candidates'",
        ),
        (
            {"model": "mixcse", "masked_cell": "exclude"},
            "masked_cell: want 'zero' with form slides of mixcse, got 'exclude'",
        ),
        (
            {"model": "mixcse", "hard_negative_weight": 1.0},
            "hard_negative_weight: want 0.0 with form slides of mixcse, got 1.0",
        ),
        (
            {"model": "simcse", "hard_negative_weight": 1.0},
            "hard_negative_weight: want 0.0 with model simcse, got 1.0",
        ),
        (
            {"model": "simcse", "corpus": ("a.tsv", "b.txt")},
            r"corpus: want all files or none to end in .tsv, .tsv.gz or .tsv.xz, got 'b.txt' among others",
        ),
        (
            {"model": "mixcse", "corpus": ("a.txt", "b.tsv.gz")},
            r"corpus: want all files or none to end in .*, got 'a.txt' among others",
        ),
        (
            {"model": "simcse", "corpus": ("a.tsv",), "valid": "held.txt"},
            "valid: want rows as the corpus has, a file that ends in .*, got 'held.txt'",
        ),
        ({"model": "simcse", "valid": "held.tsv"}, "valid: want sentences, got 'held.tsv'"),
        (RELEASED | {"partner": "previous"}, "partner: want one of next, random, got 'previous'"),
    ],
)
def test_options_that_a_loss_does_not_have_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        TrainConfig(**{"corpus": ("x",)} | settings)


def test_options_reach_the_loss():
    given = {"partner": "random", "blocks": "candidates", "masked_cell": "exclude"}
    given |= {"hard_negative_weight": 0.5, "mix": 0.4, "scale": 7.0}
    config = TrainConfig(("x",), **RELEASED | given, stop_gradient="no", word_dim=4)
    options = build_model(config, 9).loss.function_options()
    assert options == {"form": "released", "stop_gradient": False, **given}


def test_the_weight_of_hard_negatives_reaches_simcse():
    config = TrainConfig(("x.tsv.xz",), model="simcse", hard_negative_weight=0.5, word_dim=4)
    assert build_model(config, 9).loss.function_options() == {"scale": 20.0, "hard_negative_weight": 0.5}


def test_a_renamed_corpus_stays_what_it_was():
    rows, sentences = (TrainConfig((name,), model="simcse") for name in ("x.tsv", "x.txt"))
    with pytest.raises(
        InputError, match=r"cannot resume: corpus: want names that end as in x.tsv, got x.txt"
    ):
        sentences.check_resumes(rows)


@pytest.mark.parametrize(
    ("model", "every"), [("quickthoughts", 500), ("gloss-bow", 500), ("simcse", 125), ("mixcse", 125)]
)
def test_views_are_validated_every_125_steps(model, every):
    assert TrainConfig(("x",), model=model).valid_every == every
    assert TrainConfig(("x",), model=model, valid_every=7).valid_every == 7
