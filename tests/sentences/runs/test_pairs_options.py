"""Options of pairs that a model or a loss does not have are refused, and the others reach the loss."""

import pytest

from fastqt.errors import InputError
from fastqt.nn import DistillationLoss, GISTEmbedLoss, MultipleNegativesRankingLoss
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import build_model

TEACHER = ("q.npy", "d.npy")


def pairs(**settings):
    return TrainConfig(("x.tsv",), model="pairs", word_dim=8, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"matryoshka_dims": (2,)}, r"matryoshka_dims: want None with model simcse, got \(2,\)"),
        ({"teacher": TEACHER}, "teacher: want None with model simcse, got"),
        ({"query_prompt": "query: "}, "query_prompt: want '' with model simcse, got 'query: '"),
        ({"loss": "gist"}, "loss: want 'ranking' with model simcse, got 'gist'"),
    ],
)
def test_other_models_have_none_of_them(settings, message):
    with pytest.raises(InputError, match=message):
        TrainConfig(("x.tsv",), model="simcse", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hard_negative_weight": 1.0}, "hard_negative_weight: want 0.0 with model pairs, got 1.0"),
        ({"masked_words": 0.1}, "masked_words: want 0.0 with model pairs, got 0.1"),
        ({"encoder": "combine"}, "encoder: want combine with model quickthoughts alone, got pairs"),
        ({"guide_margin": 0.1}, "guide_margin: want 0.0 with loss ranking of pairs, got 0.1"),
        ({"directions": ("doc_to_doc",)}, "directions: want query_to_doc among them, got doc_to_doc"),
        ({"directions": ("doc",)}, "directions: want one of query_to_doc, .*, got 'doc'"),
        ({"directions": ()}, r"directions: want one value or several, got \(\)"),
        (
            {"directions": ("query_to_doc", "doc_to_doc"), "partition_mode": "per_direction"},
            "partition_mode: want joint with doc_to_doc, whose scores do not contain the positive",
        ),
        ({"hardness_mode": "all_negatives"}, "hardness_strength: want a number above 0 with a hardness_mode"),
        ({"hardness_strength": 2.0}, "hardness_strength: want .* and 0 without, got 2 with None"),
        ({"matryoshka_dims": (0, 2)}, "matryoshka_dims: want at least 1"),
        ({"matryoshka_dims": (2.5,)}, "matryoshka_dims: want an integer, got 2.5"),
        ({"matryoshka_weights": (1.0,)}, "matryoshka_weights: want matryoshka_dims too"),
        ({"margin_strategy": "relative"}, "margin_strategy: want it with a false_negative_margin alone"),
        ({"loss": "gist"}, "teacher: want .npy files with loss gist, got None"),
        ({"loss": "distillation"}, "teacher: want .npy files with loss distillation, got None"),
        ({"teacher_weight": 1.0}, "teacher_weight: want it with a teacher alone, got 1"),
        ({"teacher": TEACHER, "teacher_weight": 0.0}, "teacher_weight: want more than 0 with loss ranking"),
        (
            {"teacher": TEACHER, "loss": "gist", "teacher_scale": 5.0},
            "teacher_scale: want it with a teacher whose scores are learnt, got 5",
        ),
        (
            {"teacher": TEACHER, "loss": "gist", "directions": ("query_to_doc", "doc_to_query")},
            "directions: want no doc_to_query with loss gist",
        ),
        (
            {"teacher": TEACHER, "loss": "gist", "false_negative_margin": 0.1},
            "false_negative_margin: want None with loss gist of pairs, got 0.1",
        ),
        (
            {"teacher": TEACHER, "loss": "distillation", "matryoshka_dims": (2, 4)},
            "matryoshka_dims: want None with loss distillation of pairs",
        ),
        ({"query_prompt": "\udcff"}, "query_prompt: want UTF-8"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        pairs(**settings)


def test_options_reach_the_losses():
    given = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    given |= {"hardness_mode": "hard_negatives", "hardness_strength": 5.0}
    given |= {"matryoshka_dims": (2, 4), "matryoshka_weights": (1.0, 0.5), "false_negative_margin": 0.1}
    loss = build_model(pairs(**given, margin_strategy="relative", scale=7.0), 9).loss
    assert isinstance(loss, MultipleNegativesRankingLoss)
    given["false_negative_margin_strategy"] = "relative"
    assert loss.function_options() == {"scale": 7.0, **given}

    gist = pairs(loss="gist", teacher=TEACHER, guide_margin=0.1, directions=("query_to_doc",))
    loss = build_model(gist, 9).loss
    assert isinstance(loss, GISTEmbedLoss)
    contrasts = {"contrast_anchors": False, "contrast_positives": False}
    assert loss.function_options() == {"scale": 20.0, "margin": 0.1, **contrasts}

    taught = pairs(loss="distillation", teacher=TEACHER, teacher_scale=5.0, learn_scale=True, max_scale=30.0)
    loss = build_model(taught, 9).loss
    assert isinstance(loss, DistillationLoss)
    assert loss.options == {"teacher_scale": 5.0}
    assert loss.max_scale == 30.0


def test_settings_are_the_same_after_they_were_stored(tmp_path):
    config = pairs(directions=("query_to_doc",), matryoshka_dims=(2, 4), teacher=TEACHER)
    (tmp_path / "config.json").write_text(config.to_json())
    assert TrainConfig.load(tmp_path / "config.json") == config
