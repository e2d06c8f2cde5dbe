"""What docs/evaluation.md names exists, and its table shows stored runs."""

import json
import re
from pathlib import Path

import numpy as np

import fastqt.sentences.evaluation
from fastqt.sentences.evaluation.tasks import Options, sources

TEXT = (Path(__file__).parents[3] / "docs" / "evaluation.md").read_text()


def test_all_named_tasks_and_functions_exist():
    named = set(re.findall(r"`(\w+)\(", TEXT)) - {"SentenceTransformer"}
    assert named <= set(fastqt.sentences.evaluation.__all__) | {"retrieve"}
    table = TEXT[TEXT.index("| task |") : TEXT.index("Files are")]
    for task in sources(Options()):
        assert ("STS12 to STS16" if task.startswith("STS1") else task) in table


def test_the_table_of_clip_art_shows_stored_runs():
    stored = Path(__file__).parents[3] / "benchmarks" / "results" / "retrieval"
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
