"""Averages of real word vectors on real tasks, compared with scripts that share no code with the package."""

import csv
import itertools
import lzma
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score

from fastqt.sentences.evaluation import evaluate, load_encoder

DATA = Path(__file__).parents[4] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the benchmarks and word vectors are not here")

GRID = (1.0, 64.0)
CORRELATION = 1e-4  # error of a rank correlation over a few thousand float32 cosines


def read(path):
    with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def glove():
    with lzma.open(DATA / "vectors" / "glove.6B.50d.top2446.txt.xz", "rt", encoding="utf-8") as file:
        return {line.split()[0]: np.array(line.split()[1:], dtype=float) for line in file}


GLOVE = f"word-vectors:{DATA}/vectors/glove.6B.50d.top2446.txt.xz"


def average(vectors, text):
    pieces = re.findall(
        r"[a-zà-öø-ÿœ]+(?:['\-][a-zà-öø-ÿœ]+)*|[0-9]+|\S", text.lower().replace(chr(0x2019), chr(39))
    )
    known = [vectors[piece] for piece in pieces if piece in vectors]
    return sum(known) / len(known) if known else np.zeros(len(next(iter(vectors.values()))))


def test_subjectivity(tmp_path):
    rows = read(DATA / "eval" / "SUBJ" / "all.tsv.xz")[::40]
    (tmp_path / "SUBJ").mkdir()
    (tmp_path / "SUBJ" / "all.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    found = evaluate(load_encoder(GLOVE).encode, tmp_path, ["SUBJ"], grid=GRID).tasks["SUBJ"]

    vectors = glove()
    features, labels = np.array([average(vectors, text) for _, text in rows]), [label for label, _ in rows]
    shuffled = StratifiedKFold(10, shuffle=True, random_state=0)
    search = GridSearchCV(LogisticRegression(solver="newton-cholesky"), {"C": GRID}, cv=shuffled)
    wanted = cross_val_score(search, features, labels, cv=shuffled)
    # One of the 25 examples of a fold may lie on the decision boundary, or decide between two values of C.
    np.testing.assert_allclose(found["folds"], wanted, atol=0.05)
    assert found["accuracy"] == pytest.approx(wanted.mean(), abs=0.005)
    assert found["accuracy"] > 0.75


def test_textual_similarity():
    found = evaluate(load_encoder(GLOVE).encode, DATA / "eval", ["STS14"]).tasks["STS14"]

    vectors, scores, gold = glove(), {}, {}
    for subset, score, first, second in read(DATA / "eval" / "STS" / "STS14.tsv.xz"):
        u, v = average(vectors, first), average(vectors, second)
        norms = np.linalg.norm(u) * np.linalg.norm(v)
        scores.setdefault(subset, []).append(round(u @ v / norms, 6) if norms else 0.0)
        gold.setdefault(subset, []).append(float(score))
    for measure, correlation in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr)):
        each = {subset: correlation(scores[subset], gold[subset])[0] for subset in scores}
        sizes = [len(gold[subset]) for subset in each]
        wanted = {
            "mean": np.mean(list(each.values())),
            "wmean": np.average(list(each.values()), weights=sizes),
            "all": correlation(*(list(itertools.chain(*part.values())) for part in (scores, gold)))[0],
        }
        for subset, value in each.items():
            assert found["subsets"][subset][measure] == pytest.approx(value, abs=CORRELATION)
        for aggregate, value in wanted.items():
            assert found[aggregate][measure] == pytest.approx(value, abs=CORRELATION)
    assert found["wmean"]["pearson"] > 0.2
