"""--init-from: a training that begins with the weights and the vocabulary of an earlier run."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fastqt.sentences.cli import main
from fastqt.sentences.runs.config import TrainConfig
from tests.shared.rank_pool import Pool
from tests.shared.trainings import assert_same_weights, lines_of

ENCODER = ["--encoder", "gru", "--hidden-size", "6", "--word-dim", "4"]
TRAINING = ["--batch-size", "16", "--learning-rate", "0.01", "--report-every", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A trained model of pairs, and negatives that it has mined for them."""
    folder = tmp_path_factory.mktemp("init")
    rows = [f"who wrote book{i}\tauthor{i} wrote it{i % 5}" for i in range(48)]
    (folder / "pairs.tsv").write_text("".join(f"{row}\n" for row in rows))
    run = ["train", str(folder / "pairs.tsv"), "--model", "pairs", "--out", str(folder / "run")]
    assert main([*run, *ENCODER, *TRAINING, "--epochs", "2", "--query-prompt", "query: "]) == 0
    mined = ["mine", str(folder / "run"), str(folder / "pairs.tsv"), "--negatives", "2"]
    assert main([*mined, "--out", str(folder / "mined.tsv")]) == 0
    return folder


def again(folder, out, *options):
    words = ["train", str(folder / "mined.tsv"), "--init-from", str(folder / "run")]
    return main([*words, *TRAINING, "--out", str(folder / out), *options])


def test_a_training_with_mined_negatives_begins_where_the_first_one_ended(folder):
    """What is not on the command line is as in the first run; the optimiser and the steps begin anew."""
    assert again(folder, "again", "--learning-rate", "0", "--steps", "1") == 0
    weights, earlier = (load_file(folder / run / "model.safetensors") for run in ("again", "run"))
    assert weights.keys() == earlier.keys()
    assert all(torch.equal(weights[name], earlier[name]) for name in weights)
    assert (folder / "again" / "vocabulary.json").read_bytes() == (
        folder / "run" / "vocabulary.json"
    ).read_bytes()
    settings, before = (TrainConfig.load(folder / run / "config.json") for run in ("again", "run"))
    assert (settings.model, settings.encoder, settings.query_prompt) == ("pairs", "gru", "query: ")
    assert settings.init_from == str(folder / "run")
    assert (settings.steps, before.steps) == (1, None)

    assert again(folder, "learnt", "--epochs", "1") == 0
    assert [line["step"] for line in lines_of(folder / "learnt")] == [1, 2, 3]
    weights = load_file(folder / "learnt" / "model.safetensors")
    assert not all(torch.equal(weights[name], earlier[name]) for name in weights)


def test_a_resumed_training_does_not_begin_with_the_earlier_run_again(folder):
    assert again(folder, "whole", "--steps", "3", "--keep-checkpoint") == 0
    assert again(folder, "parts", "--steps", "2", "--keep-checkpoint") == 0
    assert main(["train", "--resume", "--out", str(folder / "parts"), "--steps", "3"]) == 0
    weights, parts = (load_file(folder / run / "model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(weights[name], parts[name]) for name in weights)


@pytest.fixture(scope="module")
def pool():
    pool = Pool(2)
    yield pool
    pool.close()


def test_two_ranks_begin_with_the_weights_of_the_earlier_run(pool, folder):
    """Each of them: from there they train as one process does on their batches together."""
    assert pool.run(2, again, folder, "kept", "--learning-rate", "0", "--steps", "1") == [0, 0]
    assert_same_weights(folder / "kept", folder / "run")
    assert pool.run(2, again, folder, "two", "--batch-size", "8", "--epochs", "1") == [0, 0]
    assert again(folder, "one", "--epochs", "1") == 0
    two, one = (load_file(folder / run / "model.safetensors") for run in ("two", "one"))
    for name, wanted in one.items():
        torch.testing.assert_close(two[name], wanted, rtol=0, atol=2e-5, msg=name)
    losses = [[line["loss"] for line in lines_of(folder / run)] for run in ("two", "one")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_two_ranks_refuse_a_run_that_does_not_fit(pool, folder):
    assert pool.run(2, again, folder, "refused", "--hidden-size", "8") == [2, 2]
    assert not Path(folder / "refused" / "config.json").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--encoder", "lstm"], "encoder: want 'gru' as RUN has it, got 'lstm'"),
        (["--hidden-size", "8"], "hidden_size: want 6 as RUN has it, got 8"),
        (["--unknown", "drop"], "unknown: want 'keep' as RUN has it, got 'drop'"),
        (["--vocabulary", "tokenizer.json"], "vocabulary: want None as RUN has it, got 'tokenizer.json'"),
        (["--checkpoint", "minilm"], "init_from: want none with checkpoint, got RUN"),
        (
            ["--model", "gloss-bow", "--encoder", "bow"],
            "init_from: want none with model gloss-bow, got 'RUN'",
        ),
        (
            ["--model", "quickthoughts"],
            "init_from: want a run whose weights are those of this model, got RUN",
        ),
        (["--init-from", "nowhere"], "init_from: want a directory that train wrote, got nowhere"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_a_run_that_does_not_fit_is_refused_in_one_line(folder, capsys, options, words):
    assert again(folder, "refused", *options) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fastqt: ")]
    assert line.startswith(f"fastqt: {words.replace('RUN', str(folder / 'run'))}")
    assert not Path(folder / "refused" / "config.json").exists()


def test_a_run_is_not_resumed_with_another_beginning(folder, capsys):
    assert main(["train", "--resume", "--out", str(folder / "run"), "--init-from", "elsewhere"]) == 2
    assert (
        "cannot resume: init_from is 'elsewhere', but the run was started with None"
        in capsys.readouterr().err
    )
