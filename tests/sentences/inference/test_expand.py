"""Vocabulary expansion of a trained model by pre-trained word vectors."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fastqt.errors import InputError
from fastqt.sentences.cli import main
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.expand import add_words, expand_vocabulary, fit_affine
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.files import locked
from fastqt.sentences.text import Vocabulary
from fastqt.sentences.train import train
from tests.shared.tolerances import FLOAT32, FLOAT64, relative
from tests.shared.word_vectors import write_vectors

W = 5
SMALL = {"word_dim": 6, "hidden_size": 6, "layers": 1, "heads": 2, "feedforward": 8}
NEW = ["zebra", "yak"]


@pytest.fixture(params=["bow", "bigru", "transformer", "skip-thoughts"])
def model(request, planted, tmp_path):
    kind = {"model": request.param} if request.param == "skip-thoughts" else {"encoder": request.param}
    config = TrainConfig((planted[0],), **SMALL | kind, batch_size=48, steps=2, device="cpu")
    train(config, tmp_path / "model")
    return tmp_path / "model"


def pretrained(model) -> tuple[list[str], np.ndarray]:
    """Vectors for most words of a model, for new words, and for entries that are not words."""
    known = sorted(SentenceEncoder.load(model, "cpu").vocabulary.tokenizer.get_vocab())[5:]
    words = [*NEW, "two words", "hy-phen", "<unk>", *(word for word in known if word != "<unk>")]
    return words, np.random.default_rng(0).normal(size=(len(words), W)).astype(np.float32)


def test_new_words_get_vectors_and_old_words_keep_theirs(model, tmp_path, capsys):
    words, vectors = pretrained(model)
    assert add_words(model, words, vectors, tmp_path / "expanded") == len(NEW)
    before, after = (SentenceEncoder.load(folder, "cpu") for folder in (model, tmp_path / "expanded"))
    old_weights, weights = before.model.state_dict(), after.model.state_dict()
    V = len(before.vocabulary)
    assert len(after.vocabulary) == V + 2
    tables = [name for name, weight in weights.items() if len(weight) == V + 2]
    assert len(tables) == (3 if "previous.output" in tables else 2)
    for name, weight in weights.items():
        if name not in tables:
            assert torch.equal(weight, old_weights[name])
            continue
        assert torch.equal(weight[:V], old_weights[name])
        ids = before.vocabulary.tokenizer.get_vocab()
        shared = [number for number, word in enumerate(words) if word in ids and word != "<unk>"]
        design = np.hstack([vectors, np.ones((len(words), 1))]).astype(np.float64)
        targets = old_weights[name][[ids[words[number]] for number in shared]].double().numpy()
        wanted = design[:2] @ np.linalg.lstsq(design[shared], targets, rcond=None)[0]
        assert relative(weight[V:], wanted) <= FLOAT32
    first, *_ = (word for word in words if word.startswith("place"))
    assert np.array_equal(after.encode([first]), before.encode([first]))
    assert np.array_equal(after.encode([f"{first} ox"]), before.encode([f"{first} ox"]))
    with_new = [f"{first} zebra"]
    assert np.abs(after.encode(with_new) - before.encode(with_new)).max() > 1e-3
    assert np.abs(after.encode(with_new) - after.encode([f"{first} yak"])).max() > 1e-3

    text = tmp_path / "text.txt"
    text.write_text(f"{first} zebra\n")
    assert main(["embed", str(tmp_path / "expanded"), str(text), "--out", str(tmp_path / "x.npy")]) == 0
    assert np.array_equal(np.load(tmp_path / "x.npy"), after.encode(with_new))
    capsys.readouterr()


@pytest.mark.parametrize("model", ["bow"], indirect=True)
def test_words_and_vectors_that_do_not_fit_are_refused(model, tmp_path):
    words, vectors = pretrained(model)
    for arguments, message in (
        (([*words[:-1], words[0]], vectors), "words: want distinct ones, got 1 more than once"),
        ((words[:10], vectors[:10]), "words: want more of the model's than the vectors' 5 dim.*got 5"),
    ):
        with pytest.raises(InputError, match=message):
            add_words(model, *arguments, tmp_path / "expanded")
        assert not (tmp_path / "expanded").exists()
    with pytest.raises(InputError, match="already holds a model"):
        add_words(model, words, vectors, model)
    with pytest.raises(InputError, match="no trained model"):
        add_words(tmp_path / "absent", words, vectors, tmp_path / "expanded")


@pytest.mark.parametrize("model", ["bow"], indirect=True)
def test_a_failed_write_or_another_writer_leaves_no_part_of_a_model(model, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    out, other = tmp_path / "expanded", tmp_path / "other"
    with monkeypatch.context() as patch:
        patch.setattr("fastqt.sentences.inference.expand.save_model", full)
        with pytest.raises(OSError, match="No space left on device"):
            add_words(model, *pretrained(model), out)
    assert not out.exists()
    add_words(model, *pretrained(model), out)
    assert len(list(out.iterdir())) == 3
    other.mkdir()
    with locked(other), pytest.raises(InputError, match="is writing in it: wait until it ends"):
        add_words(model, *pretrained(model), other)
    (other / "metrics.jsonl").touch()
    with pytest.raises(InputError, match=r"a file of its name, metrics\.jsonl"):
        add_words(model, *pretrained(model), other)
    assert [path.name for path in other.iterdir()] == ["metrics.jsonl"]


def test_a_model_without_word_vectors_is_refused(planted, tmp_path):
    config = TrainConfig((planted[0],), model="gloss-bow", word_dim=6, batch_size=48, steps=2, device="cpu")
    train(config, tmp_path / "model")
    with pytest.raises(InputError, match="want a model with word vectors of its own, got gloss-bow"):
        add_words(tmp_path / "model", ["a"], np.zeros((1, 5)), tmp_path / "expanded")


def test_the_command_reads_a_file_of_vectors(planted, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    train(TrainConfig((planted[0],), **SMALL, batch_size=48, steps=2, device="cpu"), run)
    words, vectors = pretrained(run)
    write_vectors(tmp_path / "vectors.txt", words, vectors)
    assert main(["expand", str(run), str(tmp_path / "vectors.txt"), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: {len(NEW)} words added\n"
    add_words(run, words, vectors, tmp_path / "same")
    files = (folder / "model.safetensors" for folder in (out, tmp_path / "same"))
    assert len({file.read_bytes() for file in files}) == 1


def test_words_with_capitals_take_part_in_the_map_with_their_lower_case_vectors(planted, tmp_path):
    """The map is fitted to all words of the model that have a vector, also to those with capital letters."""
    text = tmp_path / "capitals.txt"
    text.write_text("\n".join(line.capitalize() for line in Path(planted[0]).read_text().split("\n")))
    run = tmp_path / "run"
    train(TrainConfig((str(text),), **SMALL, batch_size=48, steps=2, device="cpu"), run)
    ids = SentenceEncoder.load(run, "cpu").vocabulary.tokenizer.get_vocab()
    capitals = [word for word in ids if word != word.lower()]
    assert len(capitals) == 6
    words = sorted({word.lower() for word in ids if word != "<unk>"}) + NEW
    vectors = np.random.default_rng(0).normal(size=(len(words), W)).astype(np.float32)
    place = {word: number for number, word in enumerate(words)}
    # The lower-case forms are new words too: the model knows them with capitals alone.
    assert add_words(run, words, vectors, tmp_path / "expanded") == len(NEW) + len(capitals)
    before, after = (SentenceEncoder.load(folder, "cpu") for folder in (run, tmp_path / "expanded"))
    known = [word for word in ids if word != "<unk>"]
    design = np.hstack([vectors, np.ones((len(words), 1))]).astype(np.float64)
    new = after.vocabulary.tokenizer.get_vocab()
    for name, weight in after.model.state_dict().items():
        targets = before.model.state_dict()[name][[ids[word] for word in known]].double().numpy()
        fitted = np.linalg.lstsq(design[[place[word.lower()] for word in known]], targets, rcond=None)[0]
        rows = [new[word] for word in NEW]
        assert relative(weight[rows], design[[place[word] for word in NEW]] @ fitted) <= FLOAT32


def test_the_map_solves_the_normal_equations():
    random = np.random.default_rng(0)
    sources, targets = random.normal(3.0, 2.0, size=(90, W)), random.normal(size=(90, 7))
    sources, targets = sources.astype(np.float32), targets.astype(np.float32)
    fitted = fit_affine(sources, targets)
    design = np.hstack([sources, np.ones((90, 1))]).astype(np.float64)
    wanted = np.linalg.solve(design.T @ design, design.T @ targets.astype(np.float64))
    assert relative(np.vstack([fitted.matrix, fitted.intercept]), wanted) <= 10 * FLOAT64
    assert relative(fitted(sources), design @ wanted) <= FLOAT64


def test_new_words_have_the_next_numbers_and_the_options_stay():
    vocabulary = Vocabulary.build(["the cat sat", "the cat"], 3, unknown="drop", max_length=4)
    grown = expand_vocabulary(vocabulary, ["mat", "sat"])
    assert (len(vocabulary), len(grown)) == (3, 5)
    assert vocabulary.encode(["the cat sat on the mat"]).ids.tolist() == [2, 1, 2]
    assert grown.encode(["the cat sat on the mat"]).ids.tolist() == [2, 1, 4, 2]
