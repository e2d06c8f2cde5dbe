"""Hard negatives: those of sentence-transformers on the same vectors, of a search by hand, and in files."""

import numpy as np
import pytest
import torch

from fastqt.errors import InputError
from fastqt.sentences.inference import mine as module
from fastqt.sentences.inference import search as best
from fastqt.sentences.inference.mine import mine, mine_pairs
from fastqt.sentences.options.commands import MineOptions

OPTIONS = [
    {},
    {"negatives": 5, "range_min": 3},
    {"negatives": 2, "range_min": 1, "range_max": 6},
    {"max_score": 0.6},
    {"min_score": 0.2, "negatives": 4},
    {"absolute_margin": 0.1},
    {"relative_margin": 0.3, "range_min": 2},
    {"absolute_margin": 0.05, "relative_margin": 0.1, "max_score": 0.7, "min_score": 0.1, "negatives": 6},
    {"negatives": 40, "range_max": 200},  # more than there are documents
]


class Vectors:
    """Vectors by text, with what sentence-transformers' function asks a model for."""

    device = torch.device("cpu")

    def __init__(self, vectors):
        self.vectors = vectors
        self.width = len(next(iter(vectors.values())))

    def encode(self, texts, **_):
        rows = np.array([self.vectors[text] for text in texts], np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    encode_query = encode_document = encode

    def similarity(self, a, b):
        return torch.as_tensor(a) @ torch.as_tensor(b).T

    def similarity_pairwise(self, a, b):
        return (torch.as_tensor(a) * torch.as_tensor(b)).sum(dim=1)


def draw(seed=0):
    """60 texts as documents, and 12 queries near their positives, of which some have two."""
    generator = np.random.default_rng(seed)
    vectors = {f"d{n}": generator.standard_normal(6) for n in range(60)}
    pairs = []
    for n in range(12):
        positives = [f"d{n}"] if n % 3 else [f"d{n}", f"d{n + 20}"]
        near = sum(vectors[name] for name in positives)
        vectors[f"q{n}"] = near + generator.standard_normal(6)
        pairs += [(f"q{n}", positive) for positive in positives]
    return vectors, pairs


def rows_of(vectors, pairs):
    """The arguments of `mine`, and the names of queries and documents."""
    documents = [name for name in vectors if name[0] == "d"]
    queries = list(dict.fromkeys(query for query, _ in pairs))
    positives = [[documents.index(p) for q, p in pairs if q == query] for query in queries]
    encode = Vectors(vectors).encode
    return encode(queries), encode(documents), positives, queries, documents


@pytest.mark.parametrize("options", OPTIONS)
def test_negatives_are_those_of_sentence_transformers(options, monkeypatch):
    """Also where the search reads 7 documents for 5 queries at a time."""
    util = pytest.importorskip("sentence_transformers.util", reason="sentence_transformers is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    vectors, pairs = draw()
    queries, documents, positives, names, texts = rows_of(vectors, pairs)
    ours = mine(queries, documents, positives, MineOptions(**options))
    monkeypatch.setattr(module, "QUERIES", 5)
    monkeypatch.setattr(best, "ROWS", 7)
    in_parts = mine(queries, documents, positives, MineOptions(**options))
    np.testing.assert_array_equal(in_parts.rows, ours.rows)

    given = {"num_negatives": 3} | {
        name.replace("negatives", "num_negatives"): x for name, x in options.items()
    }
    rows = datasets.Dataset.from_dict({"query": [q for q, _ in pairs], "answer": [p for _, p in pairs]})
    theirs = util.mine_hard_negatives(
        rows, Vectors(vectors), corpus=texts, **given, output_scores=True, verbose=False
    )
    expected = {}
    for row in theirs:
        expected.setdefault((row["query"], row["answer"]), []).append((row["negative"], row["scores"][1]))
    assert len(theirs) > 10

    for number, query in enumerate(names):
        kept = ours.rows[number] >= 0
        assert (ours.cosines[number][~kept] == -np.inf).all()
        for positive in positives[number]:
            wanted = expected.get((query, texts[positive]), [])
            assert [texts[row] for row in ours.rows[number][kept]] == [text for text, _ in wanted]
            np.testing.assert_allclose(ours.cosines[number][kept], [x for _, x in wanted], atol=1e-6)


def test_random_negatives_are_drawn_among_the_candidates():
    queries, documents, positives, *_ = rows_of(*draw(2))
    options = {"negatives": 3, "range_min": 1, "range_max": 9, "max_score": 0.8}
    candidates = mine(queries, documents, positives, MineOptions(**{**options, "negatives": 8}))
    seen = [set() for _ in queries]
    for seed in range(40):
        drawn = mine(queries, documents, positives, MineOptions(**options, sampling="random", seed=seed))
        for number, rows in enumerate(drawn.rows):
            assert len(set(rows.tolist())) == 3
            assert (np.diff(drawn.cosines[number]) <= 0).all()
            seen[number] |= set(rows.tolist())
        again = mine(queries, documents, positives, MineOptions(**options, sampling="random", seed=seed))
        np.testing.assert_array_equal(again.rows, drawn.rows)
    # Each of 8 candidates is missed by 40 draws of 3 with a chance below 1e-8.
    assert seen == [set(rows.tolist()) - {-1} for rows in candidates.rows]


def test_files_in_both_formats(tmp_path):
    vectors, pairs = draw(3)
    (tmp_path / "pairs.tsv").write_text("".join(f"{q}\t{p}\n" for q, p in [*pairs, pairs[0]]))
    (tmp_path / "corpus.txt").write_text("".join(f"d{n}\n" for n in range(60)) + "q0\n")
    queries, documents, positives, names, texts = rows_of(vectors, pairs)
    options = MineOptions(negatives=2, max_score=0.3)
    wanted = mine(queries, documents, positives, options)
    arguments = (Vectors(vectors), [str(tmp_path / "pairs.tsv")], [str(tmp_path / "corpus.txt")])

    mined = mine_pairs(*arguments, tmp_path / "triplets.tsv", options, format="triplets")
    rows = [line.split("\t") for line in (tmp_path / "triplets.tsv").read_text().splitlines()]
    assert rows == [
        [query, texts[positive], texts[row]]
        for query, own, negatives in zip(names, positives, wanted.rows, strict=True)
        for positive in own
        for row in negatives[negatives >= 0]
    ]
    short = (wanted.rows < 0).any(axis=1)
    assert mined == (len(pairs), len(rows), 61, int(short.sum()))

    mine_pairs(*arguments, tmp_path / "tuples.tsv", options, format="tuples")
    lines = (tmp_path / "tuples.tsv").read_text().splitlines()
    assert [line.split("\t") for line in lines] == [
        [query, texts[positive], *(texts[row] for row in negatives)]
        for query, own, negatives, lacks in zip(names, positives, wanted.rows, short, strict=True)
        for positive in own
        if not lacks
    ]
    # A query is no negative of itself.
    (tmp_path / "pairs.tsv").write_text("q\tp\n")
    (tmp_path / "corpus.txt").write_text("q\nd\n")
    alone = Vectors({"q": [1.0, 0.0], "p": [1.0, 1.0], "d": [0.0, 1.0]})
    mine_pairs(alone, *arguments[1:], tmp_path / "out.tsv", MineOptions(negatives=1))
    assert (tmp_path / "out.tsv").read_text() == "q\tp\td\n"


def test_options_that_do_not_fit_are_refused():
    for options, message in (
        ({"range_min": 2, "range_max": 4}, r"range_max: want at least range_min \+ negatives = 5, got 4"),
        ({"min_score": 0.5, "max_score": 0.4}, "min_score: want at most max_score, which is 0.4, got 0.5"),
    ):
        with pytest.raises(InputError, match=message):
            MineOptions(**options)
