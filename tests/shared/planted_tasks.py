"""Small files of all tasks with planted classes and scores, and an encoder that finds them."""

import lzma
import random

import numpy as np

WORDS = [f"word{number}" for number in range(12)]


def sentence(generator, *first):
    return " ".join([*first, *generator.sample(WORDS, 4)])


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.writelines("\t".join(map(str, row)) + "\n" for row in rows)


def pairs(generator, count):
    """Random pairs of sentences; the number of words that they share is their score."""
    for _ in range(count):
        words = generator.sample(WORDS, 10)
        score = generator.randint(1, 5)
        yield score, " ".join(words[:5]), " ".join([*words[:score], *words[5 : 10 - score]])


def write_tasks(folder):
    """Writes a folder per task, in which each class has a word of its own, and returns where they are."""
    generator = random.Random(0)
    for name in ("MR", "CR", "SUBJ", "MPQA"):
        rows = [(label, sentence(generator, f"class{label}")) for label in (0, 1) for _ in range(30)]
        write(folder / name / "all.tsv.xz", rows)
    for part, each in (("train", 12), ("test", 4)):
        kinds = ("ABBR", "HUM", "NUM")
        rows = [(kind, "fine", sentence(generator, kind)) for kind in kinds for _ in range(each)]
        write(folder / "TREC" / f"{part}.tsv.xz", rows)
        rows = [(int(score > 3), "a", "b", *texts) for score, *texts in pairs(generator, 8 * each)]
        write(folder / "MRPC" / f"{part}.tsv.xz", rows)
    for part in ("train", "dev", "test"):
        for kind in ("phrases", "sentences"):
            words = (f"{kind}0", f"{kind}1")
            rows = [(label, sentence(generator, words[label])) for label in (0, 1) for _ in range(15)]
            write(folder / "SST2" / f"{kind}.{part}.tsv.xz", rows)
        write(folder / "SICK" / f"{part}.tsv.xz", ((*row, "NEUTRAL", 1) for row in pairs(generator, 80)))
        write(folder / "STSB" / f"{part}.tsv.xz", (("main", *row) for row in pairs(generator, 30)))
    for year in range(12, 17):
        rows = [(subset, *row) for subset in ("one", "two", "SMT") for row in pairs(generator, 10)]
        write(folder / "STS" / f"STS{year}.tsv.xz", rows)
        write(folder / "STS_tok" / f"STS{year}.tsv.xz", [("tok", *row) for row in pairs(generator, 9)])
    return folder


class BagOfWords:
    """Encodes a sentence as its word counts, and records the batches that it was given."""

    def __init__(self):
        self.batches = []

    def __call__(self, texts):
        assert isinstance(texts, list)
        self.batches.append(texts)
        kinds = ["class0", "class1", "ABBR", "HUM", "NUM", "phrases0", "phrases1", "sentences0", "sentences1"]
        columns = [*WORDS, *kinds]
        return np.array([[text.split().count(column) for column in columns] for text in texts], dtype=float)
