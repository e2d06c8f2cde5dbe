"""All tasks on small files with planted classes and scores: reading, encoding, results, errors."""

import gzip
import json
import lzma
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import fastqt.sentences.evaluation
from fastqt.errors import InputError
from fastqt.sentences.evaluation import SENTEVAL_GRID, evaluate
from fastqt.sentences.evaluation.data import read_pairs
from fastqt.sentences.evaluation.tasks import Similar, sources
from fastqt.sentences.options.commands import EvaluationOptions as Options
from tests.shared.planted_tasks import BagOfWords, write, write_tasks

ROOT = Path(__file__).parents[3]
GRID = (1.0, 16.0)


@pytest.fixture
def data(tmp_path):
    return write_tasks(tmp_path / "data")


def test_all_tasks_find_what_was_planted(data):
    encode = BagOfWords()
    results = evaluate(encode, data, grid=GRID)
    assert list(results.tasks) == list(sources(Options()))
    for name in ("MR", "CR", "SUBJ", "MPQA", "TREC", "SST2"):
        assert results.tasks[name]["accuracy"] == 1
    assert results.tasks["MRPC"]["accuracy"] > 0.9
    assert results.tasks["MRPC"]["f1"] > 0.9
    assert results.tasks["SICK"]["pearson"] > 0.9
    assert results.tasks["SICK"]["mse"] < 0.5
    for year in range(12, 17):
        figures = results.tasks[f"STS{year}"]
        assert set(figures["subsets"]) == ({"one", "two"} if year == 13 else {"one", "two", "SMT"})
        assert figures["all"]["spearman"] > 0.99
        assert figures["subsets"]["one"]["pairs"] == 10
    assert results.tasks["STSB"]["test"]["pearson"] > 0.99
    assert results.tasks["ALIGN"]["alignment"] == pytest.approx(0)  # positive pairs have the same words
    assert results.tasks["ALIGN"]["uniformity"] < 0
    assert results.width == 21
    asked = [text for batch in encode.batches for text in batch]
    assert len(asked) == len(set(asked)) == results.sentences
    assert set(results.seconds) == {"encode", *results.tasks}


def test_the_results_of_a_small_file_by_hand(data):
    rows = [("a", 1, "word1 word2", "word1 word3"), ("a", 5, "word1", "word1"), ("b", 0, "word4", "word5")]
    rows += [("b", 5, "word1 word2 word3", "word1 word2"), ("b", 2, "word7 word8", "word8 word9 word1")]
    cosine = np.array([1 / 2, 1, 0, 2 / 6**0.5, 1 / 6**0.5])
    write(data / "STS" / "STS14.tsv.xz", rows)
    found = evaluate(BagOfWords(), data, ["STS14"]).tasks["STS14"]
    gold = np.array([row[1] for row in rows])
    b = stats.pearsonr(cosine[2:], gold[2:])[0]
    assert found["all"]["pearson"] == pytest.approx(stats.pearsonr(cosine, gold)[0])
    assert found["subsets"]["b"]["pearson"] == pytest.approx(b)
    assert found["mean"]["pearson"] == pytest.approx((1 + b) / 2)
    assert found["wmean"]["pearson"] == pytest.approx((2 + 3 * b) / 5)


def test_options_change_their_tasks(data):
    tasks = ["SST2", "STS12", "ALIGN", "MR"]
    plain = evaluate(BagOfWords(), data, tasks, grid=GRID)
    write(data / "STSB_tok" / "dev.tsv.xz", [("main", 5, "word1", "word1"), ("main", 5, "word2", "word2")])
    write(data / "STSB_tok" / "test.tsv.xz", [("main", 5, "word1", "word1")])
    encode = BagOfWords()
    other = evaluate(encode, data, tasks, grid=SENTEVAL_GRID, sst="sentences", tokenised=True, t=1, seed=1)
    assert not any("phrases" in text for batch in encode.batches for text in batch)
    assert "subsets" in plain.tasks["STS12"]
    assert set(other.tasks["STS12"]) == {"pearson", "spearman"}
    assert other.tasks["ALIGN"]["alignment"] == 0
    # Two of the six pairs of rows have the same word, at squared distance 0; the others are orthogonal, at 2.
    assert other.tasks["ALIGN"]["uniformity"] == pytest.approx(np.log((2 + 4 * np.exp(-2)) / 6))
    assert set(other.tasks["MR"]["C"]) <= set(SENTEVAL_GRID)
    assert other.settings["seed"] == 1


def test_results_as_table_and_file(data, tmp_path):
    results = evaluate(BagOfWords(), data, ["MR", "STS14", "STSB"], grid=GRID)
    lines = results.table().splitlines()
    assert lines[0].split() == ["MR", "accuracy", "100.00%"]
    assert [line.split()[:3] for line in lines[1:3]] == [["STS14", "all", x] for x in ("pearson", "spearman")]
    assert len(lines) == 1 + 6 + 4
    assert len({len(line) for line in lines}) == 1
    results.save(tmp_path / "out.json", command="by hand")
    stored = json.loads((tmp_path / "out.json").read_text())
    assert stored["tasks"] == results.tasks
    assert stored["command"] == "by hand"
    assert {"date", "machine", "versions", "settings", "seconds"} < stored.keys()
    with pytest.raises(InputError, match=r"cannot write .*: No such file or directory"):
        results.save(tmp_path / "none" / "out.json")


def test_missing_tasks_are_named(data, tmp_path):
    (data / "MR" / "all.tsv.xz").unlink()
    (data / "TREC" / "test.tsv.xz").unlink()
    results = evaluate(BagOfWords(), data, grid=(1.0,))
    assert not {"MR", "TREC"} & set(results.tasks)
    assert results.failed == {"TREC": f"no such file: {data}/TREC/test.tsv.xz"}
    for task, message in (
        ("MR", r"tasks: MR needs MR/all\.tsv\.xz in .*, which holds CR, SUBJ, MPQA, TREC, MRPC, "),
        ("TREC", r"TREC: no such file: .*TREC/test\.tsv\.xz"),
        ("IMDB", "tasks: want some of MR, CR, .*, got 'IMDB'"),
    ):
        with pytest.raises(InputError, match=message):
            evaluate(BagOfWords(), data, [task])
    with pytest.raises(InputError, match=r"data: .*/none is not a directory"):
        evaluate(BagOfWords(), data / "none")
    (data / "empty").mkdir()
    with pytest.raises(InputError, match=r"data: .*/empty holds none of the tasks MR, CR"):
        evaluate(BagOfWords(), data / "empty")


@pytest.mark.parametrize("suffix", [".tsv", ".tsv.gz"])
def test_other_suffixes_and_damaged_files(data, suffix):
    (data / "STSB" / "dev.tsv.xz").unlink()
    path = data / "STSB" / f"dev{suffix}"
    opener = gzip.open if suffix.endswith("gz") else open
    for text, message in (
        (b"main\t5\tword1\tword2\n", None),
        (b"main\t5\tword1\tword2\nmain\t5\tword1\n", "line 2: want at least 4 columns, got 3"),
        (b"main\tfive\tword1\tword2\n", "want a number in column 2: could not convert"),
        (b"main\t5\tword\xff\tword2\n", "is not UTF-8"),
    ):
        with opener(path, "wb") as file:
            file.write(text)
        if message is None:
            assert np.isnan(evaluate(BagOfWords(), data, ["STSB"]).tasks["STSB"]["dev"]["pearson"])
        else:
            with pytest.raises(InputError, match=message):
                evaluate(BagOfWords(), data, ["STSB"])


def each(column, value):
    """Puts a value into a column of all rows."""
    return lambda rows: [[*row[:column], value, *row[column + 1 :]] for row in rows]


def few_of_each(rows):
    return [row for number, row in enumerate(rows) if sum(row[0] == other[0] for other in rows[:number]) < 3]


CLASSES, FOLDS = "labels: want at least two classes to train on, got 1", "labels: want at least 10 examples"
LONE, CONSTANT = "A correlation wants at least 2 pairs", "All gold scores are 3, and a constant has no"
ALIGNED = "Alignment is that of pairs with a gold score above 4; the highest one is "
UNCHOSEN, RANGE = "C was chosen without a correlation on dev", "line 1: want a score from 1 to 5 .*, got 7"
OF_TWO = "line 1: want a score from 0 to 1 .*, got "
# A file of a task, where its label or score and its first text are, and what comes of one line, of one class
# or score, and of a 7 as the label or score: a failure, a figure that is not defined, or nothing.
FILES = {
    ("MR", "MR/all"): (0, 1, CLASSES, CLASSES, CLASSES),
    ("MPQA", "MPQA/all"): (0, 1, CLASSES, CLASSES, CLASSES),
    ("TREC", "TREC/train"): (0, 2, CLASSES, CLASSES, CLASSES),
    ("SST2", "SST2/phrases.train"): (0, 1, CLASSES, CLASSES, CLASSES),
    ("SST2", "SST2/phrases.test"): (0, 1, None, None, None),
    ("MRPC", "MRPC/train"): (0, 3, CLASSES, OF_TWO + "3", OF_TWO + "7"),
    ("SICK", "SICK/train"): (0, 1, UNCHOSEN, None, RANGE),
    ("SICK", "SICK/dev"): (0, 1, UNCHOSEN, UNCHOSEN, RANGE),
    ("SICK", "SICK/test"): (0, 1, LONE, CONSTANT, RANGE),
    ("STS12", "STS/STS12"): (1, 2, LONE, CONSTANT, "All gold scores are 7"),
    ("STSB", "STSB/test"): (1, 2, LONE, CONSTANT, "All gold scores are 7"),
    ("ALIGN", "STSB/dev"): (1, 2, ALIGNED, ALIGNED + "3", None),
}


@pytest.mark.parametrize("score", ["nan", "inf"])
def test_a_gold_score_that_is_not_finite_is_refused(tmp_path, score):
    write(tmp_path / "x.tsv.xz", [["3", "a", "b"], [score, "c", "d"]])
    with pytest.raises(InputError, match="line 2: want a finite number in column 1"):
        read_pairs(tmp_path / "x.tsv.xz", gold=0, first=1)


DAMAGES = ["missing", "empty", "one line", "one value", "out of range", "blank", "few"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("task", "name"), FILES)
def test_a_damaged_file_costs_no_other_task_its_results(data, tmp_path, task, name, damage):
    label, text, lone, constant, beyond = FILES[task, name]
    path = data / f"{name}.tsv.xz"
    with lzma.open(path, "rt") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    of_folds = {CLASSES: None if task == "SST2" else FOLDS, ALIGNED: ALIGNED}.get(lone)
    change, outcome = {
        "missing": (None, "no such file: .*" + name),
        "empty": (lambda rows: [], "is empty"),
        "one line": (lambda rows: rows[:1], lone),
        "one value": (each(label, "3"), constant),
        "out of range": (each(label, "7"), beyond),
        "blank": (each(text, " "), f"line 1: want a text in column {text + 1}, got none"),
        "few": (few_of_each, of_folds),
    }[damage]
    if change is None:
        if name.endswith("all") or task in ("STS12", "ALIGN"):
            return  # test_missing_tasks_are_named
        path.unlink()
    else:
        write(path, change(rows))

    kept = []
    results = evaluate(BagOfWords(), data, [task, "STS14"], grid=(1.0,), after_task=kept.append)
    assert set(results.failed) | set(results.tasks) == {task, "STS14"}
    assert results.tasks["STS14"]["all"]["spearman"] > 0.99
    reason = results.failed.get(task) or json.dumps(results.tasks[task])
    assert outcome is None or re.search(outcome, reason), reason
    if outcome is None:
        assert task in results.tasks
        assert "undefined" not in reason
    told = results.table()
    assert results.failed.get(task, "") in told

    results.save(tmp_path / "out.json")
    stored = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert stored["failed"] == results.failed
    assert ("null" in (tmp_path / "out.json").read_text()) == ("undefined" in reason)
    assert kept[-1] == results


def test_results_are_given_after_each_task_whatever_comes_of_it(data, monkeypatch):
    kept, fails, evaluate_task = [], [False, True, False, True], Similar.evaluate

    def failing(*arguments):
        if fails.pop(0):
            raise ZeroDivisionError("of the task")
        return evaluate_task(*arguments)

    monkeypatch.setattr(Similar, "evaluate", failing)
    results = evaluate(BagOfWords(), data, ["STS12", "STS14", "STSB"], after_task=kept.append)
    assert results.failed == {"STS14": "ZeroDivisionError: of the task"}
    assert [each.unfinished for each in kept] == [("STS14", "STSB"), ("STSB",), ()]
    assert list(kept[-1].tasks) == ["STS12", "STSB"]
    assert results.table().endswith("\nSTS14: failed: ZeroDivisionError: of the task")
    with pytest.raises(InputError, match="STS12: ZeroDivisionError: of the task"):
        evaluate(BagOfWords(), data, ["STS12"])


def test_subsets_without_a_correlation_are_told(data):
    rows = [(name, score, "word1 word2", f"word1 word{score}") for name in "ab" for score in (2, 3, 4)]
    of_smt = [("SMT", *row[1:]) for row in rows]
    write(data / "STS" / "STS13.tsv.xz", [*rows, ("c", 1, "word1", "word1"), *of_smt])
    results = evaluate(BagOfWords(), data, ["STS13"])
    assert "STS13: not defined. c: A correlation wants at least 2 pairs; there is 1." in results.table()
    assert np.isnan(results.tasks["STS13"]["mean"]["pearson"])
    assert results.tasks["STS13"]["all"]["pearson"] == results.tasks["STS13"]["all"]["pearson"]
    write(data / "STS" / "STS13.tsv.xz", of_smt)
    with pytest.raises(InputError, match=r"STS13: .*: want other pairs than those of SMT, .*, got none"):
        evaluate(BagOfWords(), data, ["STS13"])


def test_wrong_options_and_encoders_are_refused(data):
    with pytest.raises(InputError, match=r"grid: want one value or several, got \(\)"):
        evaluate(BagOfWords(), data, grid=())
    for encode, message in (
        (lambda texts: np.ones(len(texts)), r"want vectors \(\d+, d\) for \d+ sentences, got \(\d+,\)"),
        (lambda texts: np.ones((3, 3)), r"want vectors \(\d+, d\) for \d+ sentences, got \(3, 3\)"),
        (lambda texts: np.full((len(texts), 3), np.nan), "want finite vectors, got NaN or infinity"),
    ):
        with pytest.raises(InputError, match=f"encode: {message}"):
            evaluate(encode, data, ["STS12"])


TEXT = (ROOT / "docs" / "evaluation.md").read_text()


def test_all_named_tasks_and_functions_exist():
    named = set(re.findall(r"`(\w+)\(", TEXT)) - {"SentenceTransformer"}
    assert named <= set(fastqt.sentences.evaluation.__all__) | {"retrieve"}
    table = TEXT[TEXT.index("| task |") : TEXT.index("Files are")]
    for task in sources(Options()):
        assert ("STS12 to STS16" if task.startswith("STS1") else task) in table


def test_the_table_of_clip_art_shows_stored_runs():
    stored = ROOT / "benchmarks" / "results" / "retrieval"
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", TEXT[TEXT.index("A run on clip art") :], re.MULTILINE)
    rows = [row for row in rows if not row[0].startswith("---")]
    names = ("captions", "quickthoughts", "random", "word2vec", "chance")
    for name, (_, *cells) in zip(names[1:], rows[1:], strict=True):
        runs = sorted(stored.glob("openclipart-*.json" if name == "chance" else f"openclipart-{name}-*.json"))
        assert len(runs) == (9 if name == "chance" else 3)
        for direction, cell in zip(("captions by image", "images by caption"), cells, strict=True):
            tasks = [json.loads(run.read_text())["tasks"][direction] for run in runs]
            found = [task["chance"] if name == "chance" else task for task in tasks]
            shares = [100 * np.mean([each[f"R@{limit}"] for each in found]) for limit in (1, 5, 10)]
            median = np.mean([each["median rank"] for each in found])
            assert cell == f"{' / '.join(f'{share:.1f}' for share in shares)}, {median:.1f}"
