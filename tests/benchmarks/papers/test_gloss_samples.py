"""The samples of GLOSS are of the sentences that are asked for, and of the trained latent vectors."""

import json

import pytest
import torch

from benchmarks.papers import gloss_samples, gloss_sentences
from benchmarks.papers.gloss_samples import ANY, PRONOUN, SETTINGS, Setting, perform, settings
from benchmarks.papers.gloss_sentences import Decoder, new_words, pairs, split, statements

TEXT = """He saw the old man.
He saw the old man.
She said nothing at all.
"He saw it all."
The man saw it all.
He was, at last, here.
Mr. Brown saw it.
They never saw the xylophone.
"""


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_text(TEXT)
    return path


def test_statements_are_whole_distinct_and_of_frequent_words(corpus, monkeypatch):
    assert sorted(statements([corpus], PRONOUN)) == [
        "He saw the old man.",
        "She said nothing at all.",
        "They never saw the xylophone.",
    ]
    assert "The man saw it all." in statements([corpus], ANY)
    monkeypatch.setattr(gloss_sentences, "WORDS", 3)
    assert statements([corpus], PRONOUN) == [], "each of them has a word that is not among the first three"


def test_pairs_are_seeded_and_disjoint():
    found = pairs(11, 8)
    assert len(found) == 5
    assert len({row for pair in found for row in pair}) == 10
    assert found == pairs(11, 8)


def test_new_words_are_those_of_neither_end():
    assert new_words([[["a", "b"], ["a", "c"]]], [["a", "b"]]) == 1 / 4


def test_settings_have_names_of_their_own():
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)


@pytest.mark.slow
def test_a_setting_is_trained_and_measured(tmp_path, monkeypatch):
    pytest.importorskip("scipy", reason="the extra eval is not installed")
    monkeypatch.setattr(gloss_samples, "UNSEEN", 6)
    people, verbs, things = (
        ("He", "She", "They", "We"),
        ("saw", "took", "left"),
        ("sea", "ship", "bird", "hat"),
    )
    sentences = [f"{a} {b} the old {c}." for a in people for b in verbs for c in things]
    setting = Setting("small", PRONOUN, 12, 100, batch_size=16)
    monkeypatch.setattr(gloss_samples, "SHOWN_SETTING", setting)
    found, shown = perform(setting, sentences, tmp_path)
    assert found["settings"] == settings(setting)
    assert found["trained"] == 42
    assert found["reproduced"]["trained"]["right"] > 0.95
    assert found["reproduced"]["trained"]["in_sentence"] >= found["reproduced"]["trained"]["right"]
    assert (
        found["made"]["between trained, linear"]["pairs"]
        > found["made"]["between trained, linear"]["in_another_order"]["pairs"]
    )
    assert [way["sentences"] for way in found["inference"]] == [6, 6]
    assert str(tmp_path) not in json.dumps(found)
    decoder = Decoder(tmp_path / "small", sentences[:-6])
    (a, b), *_ = pairs(42, 3)
    (way,) = decoder.between(decoder.latents, decoder.trained, [(a, b)])
    made = decoder.generate(decoder.latents[[a]] * 0.8 + decoder.latents[[b]] * 0.2, [6])
    assert way[0] == made[0]
    assert f"[{sentences[a]}]" in shown
    assert decoder.generate(decoder.latents, [6] * 42)[a] == split(sentences[a])
    again = decoder.drawn(5, fitted=True)
    assert again == decoder.drawn(5, fitted=True)
    assert torch.equal(decoder.infer(decoder.trained[:2]), decoder.infer(decoder.trained[:2]))
    with torch.no_grad():
        decoder.model.positions.zero_()  # now each position favours the same word
    (same,), (different,) = (decoder.generate(decoder.latents[:1], [5], once=once) for once in (False, True))
    assert same == same[:1] * 5
    assert len(set(different)) == 5
    assert same[0] in different
