"""The commands of docs/evaluation.md run, and the tasks and options that it names exist."""

import re
from pathlib import Path

import numpy as np

import fastqt.evaluation
from fastqt.evaluation.tasks import Options, sources

TEXT = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()


def test_the_python_example_runs(tmp_path):
    for path, row in (("MR/all", "{0}\tword{0} {1}\n"), ("STSB/dev", "x\t{1}\tword{1}\tword{0}\n")):
        (tmp_path / path).parent.mkdir()
        lines = "".join(row.format(label, number) for label in (0, 1) for number in range(12))
        (tmp_path / f"{path}.tsv").write_text(lines)
    (tmp_path / "STSB" / "test.tsv").write_text((tmp_path / "STSB" / "dev.tsv").read_text())
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    names = {"encode": lambda texts: np.array([[len(text), "1" in text] for text in texts]), "data": tmp_path}
    exec(example, names)
    assert set(names["results"].tasks) == {"MR", "STSB"}


def test_all_tasks_and_functions_are_there():
    named = set(re.findall(r"`(\w+)\(", TEXT)) - {"SentenceTransformer"}
    assert named <= set(fastqt.evaluation.__all__) | {"retrieve"}
    table = TEXT[TEXT.index("| task |") : TEXT.index("Files are")]
    for task in sources(Options()):
        assert ("STS12 to STS16" if task.startswith("STS1") else task) in table
