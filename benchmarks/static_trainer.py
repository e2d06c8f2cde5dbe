"""Seconds and memory of a training of static embeddings, in sentence-transformers' trainer and by fastqt.

python -m benchmarks.static_trainer --write                # all parts, on a quiet machine; twelve minutes
python -m benchmarks.static_trainer --write --parts memory # one part; what is stored of others stays

The library's trainer has its own losses, those of fastqt in their place, or these and `accelerate_static`;
`fastqt train --encoder static` is the same training without that trainer. Each has the same pairs of
consecutive sentences of a corpus, the same tokenizer and the same prefixes, and takes its turn in a process
that keeps freed memory. Of a training the steps after the first one are timed. Texts that are tokenised
before the first step are counted too: their seconds are spread over one epoch. The memory of each is that of
a process of its own, which does not keep it.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import lzma
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.measure.kept_memory import memory_kept
from benchmarks.measure.machine import here
from benchmarks.measure.quiet import Watch
from benchmarks.measure.run_tables import machine
from benchmarks.measure.tables import table
from benchmarks.paths import RESULTS, ROOT
from benchmarks.peers_trainer import quiet
from fastqt.machine.memory import mebibytes, peak_bytes
from fastqt.sentences.runs.config import TrainConfig

STORED = RESULTS / "static-trainer.json"
THEIRS, LOSSES, ACCELERATED, COMMAND = (
    "its own losses",
    "fastqt's losses",
    "`accelerate_static`",
    "`fastqt train`",
)
CONTESTANTS = (THEIRS, LOSSES, ACCELERATED, COMMAND)
VOCABULARY = 30_522
TOKENIZED_FROM = 200_000  # sentences that the tokenizer is trained on
WIDTHS = (1024, 768, 512, 256, 128, 64, 32)
RATE = 0.02
NO_RUN = "No run is stored yet: `python -m benchmarks.static_trainer --write` measures and stores one."

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """A training that is timed."""

    batch: int
    bf16: bool
    steps: int  # of which the first one is not timed
    rounds: int

    @property
    def precision(self) -> str:
        return "bfloat16" if self.bf16 else "float32"

    @property
    def rows(self) -> int:
        """Pairs of an epoch."""
        return self.batch * self.steps


CASES = {
    "2048": Case(2048, False, steps=8, rounds=3),
    "2048-bf16": Case(2048, True, steps=8, rounds=3),
    "8192": Case(8192, False, steps=3, rounds=3),
}
MEMORY, OF_MEMORY = "memory", (2048, 8192)  # the batches whose memory is measured
REPORT_EVERY = 100  # steps of `fastqt train`; the trainings here are shorter
STEPS_OF_MEMORY = 3  # from the second one on there is the optimiser's state as well


def write_data(folder: Path, sentences: Iterable[str], rows: int, vocabulary: int = VOCABULARY) -> None:
    """Writes pairs of consecutive sentences, pairs.tsv, and a tokenizer that was trained on the text."""
    from tokenizers import BertWordPieceTokenizer

    text = [
        line.strip().replace("\t", " ") for line in itertools.islice(sentences, max(TOKENIZED_FROM, 2 * rows))
    ]
    pairs = itertools.islice(((a, b) for a, b in itertools.pairwise(text) if a and b), rows)
    (folder / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs), encoding="utf-8")
    tokenizer = BertWordPieceTokenizer()
    tokenizer.train_from_iterator(text, vocab_size=vocabulary, show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))


def pairs_of(folder: Path, rows: int) -> list[tuple[str, str]]:
    """The first pairs."""
    with open(folder / "pairs.tsv", encoding="utf-8") as file:
        split = (line.rstrip("\n").partition("\t") for line in itertools.islice(file, rows))
        pairs = [(a, b) for a, _, b in split]
    if len(pairs) < rows:
        raise SystemExit(f"the corpus: want {rows:,} pairs of consecutive sentences, got {len(pairs):,}")
    return pairs


class Stopwatch:
    """The time at the end of each step, and what tokenising took within them."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.tokenising = 0.0
        self._before = 0.0

    def end_step(self) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) == 1:
            self._before = self.tokenising

    def timed(self, function: Callable[..., T]) -> Callable[..., T]:
        """The function, whose time counts as that of tokenising."""

        def call(*arguments: Any, **options: Any) -> T:
            begin = time.perf_counter()
            result = function(*arguments, **options)
            self.tokenising += time.perf_counter() - begin
            return result

        return call

    def figures(self, before: float, case: Case) -> dict[str, float]:
        """Seconds a step: all, what tokenising takes of it, and its share of the time before the first."""
        steps = len(self.ends) - 1
        return {
            "seconds": (self.ends[-1] - self.ends[0]) / steps,
            "tokenising": (self.tokenising - self._before) / steps,
            "before": before * case.batch / case.rows,
        }


def in_their_trainer(
    kind: str, case: Case, folder: Path, widths: tuple[int, ...]
) -> tuple[dict[str, float], list[float]]:
    """A training in the library's trainer: its `Stopwatch.figures`, and its losses."""
    import datasets
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer import losses as theirs
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    import fastqt.integrations.sentence_transformers as ours

    watch, values = Stopwatch(), list[float]()

    class Ends(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.end_step()

    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=widths[0])], device="cpu")
    model.model_card_data.generate_widget_examples = False
    losses: Any = theirs if kind == THEIRS else ours
    loss = losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), widths)
    loss.register_forward_hook(lambda *call: values.append(float(call[-1].detach())))
    pairs = pairs_of(folder, case.rows)

    with tempfile.TemporaryDirectory() as out, quiet():
        trainer = SentenceTransformerTrainer(
            model,
            Arguments(
                out,
                max_steps=case.steps,
                per_device_train_batch_size=case.batch,
                learning_rate=RATE,
                bf16=case.bf16,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=datasets.Dataset.from_dict(
                {"anchor": [a for a, _ in pairs], "positive": [b for _, b in pairs]}
            ),
            loss=loss,
            callbacks=[Ends()],
        )
        begin = time.perf_counter()
        if kind == ACCELERATED:
            ours.accelerate_static(trainer)
        before = time.perf_counter() - begin
        collator: Any = trainer.data_collator
        collator.preprocess_fn = watch.timed(collator.preprocess_fn)
        trainer.train()
    return watch.figures(before if kind == ACCELERATED else 0.0, case), values


def settings(case: Case, folder: Path, widths: tuple[int, ...]) -> TrainConfig:
    """Those of `fastqt train`."""
    return TrainConfig(
        (str(folder / f"{case.rows}.tsv"),),
        model="pairs",
        encoder="static",
        vocabulary=str(folder / "tokenizer.json"),
        word_dim=widths[0],
        matryoshka_dims=widths,
        batch_size=case.batch,
        learning_rate=RATE,
        clip=1.0,  # that of the library's trainer
        precision=case.precision,
        report_every=REPORT_EVERY,
        device="cpu",
    )


def by_command(case: Case, folder: Path, widths: tuple[int, ...]) -> tuple[dict[str, float], list[float]]:
    """The same as `fastqt train` trains: all between its call and its first step counts as tokenising."""
    from fastqt.sentences.train import train
    from fastqt.sentences.train.progress import Silent

    watch, said = Stopwatch(), list[float]()

    class Ends(Silent):
        @staticmethod
        def note(text: str) -> None:
            return

        @staticmethod
        def say(text: str) -> None:
            said.append(time.perf_counter())

        def advance(self, sentences: int) -> None:
            watch.end_step()

    config = settings(case, folder, widths)
    pairs = pairs_of(folder, case.rows)
    Path(config.corpus[0]).write_text("".join(f"{a}\t{b}\n" for a, b in pairs), encoding="utf-8")
    with tempfile.TemporaryDirectory() as out:
        begin = time.perf_counter()
        outcome = train(config, out, display=Ends)
    watch.ends.pop()  # in the last step the figures of a report are measured, as in few of a long training
    return watch.figures(said[0] - begin, case), [outcome.metrics["loss"]]


def training(
    name: str, case: Case, folder: Path, widths: tuple[int, ...] = WIDTHS
) -> tuple[dict[str, float], list[float]]:
    """A training of a contestant: the seconds of a step, and its losses; of the command the last one."""
    if name == COMMAND:
        return by_command(case, folder, widths)
    return in_their_trainer(name, case, folder, widths)


def times(case: Case, folder: Path, widths: tuple[int, ...] = WIDTHS) -> dict[str, dict[str, float]]:
    """The medians of each contestant's figures, in turns."""
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    with memory_kept():
        for turn in range(case.rounds):
            for name in CONTESTANTS[:: -1 if turn % 2 else 1]:
                figures[name].append(training(name, case, folder, widths)[0])
                print(f"{case.batch:,} {case.precision} {name}: {figures[name][-1]}", flush=True)
    return {
        name: {what: statistics.median(each[what] for each in several) for what in several[0]}
        for name, several in figures.items()
    }


def peak(name: str, batch: int, folder: Path, widths: tuple[int, ...] = WIDTHS) -> int | None:
    """The most bytes that this process takes in a training."""
    training(name, Case(batch, False, STEPS_OF_MEMORY, 1), folder, widths)
    return peak_bytes()


def peaks(batch: int, folder: Path) -> dict[str, int | None]:
    """The same in a process of its own for each contestant."""

    def of(name: str) -> int | None:
        command = [sys.executable, "-m", "benchmarks.static_trainer", "--peak", name, str(batch), str(folder)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        result: int | None = json.loads(done.stdout.splitlines()[-1])
        print(f"{batch:,} {name}: {mebibytes(result)} MiB", flush=True)
        return result

    return {name: of(name) for name in CONTESTANTS}


def stored() -> dict[str, Any]:
    """The stored runs, by the names of the parts; none before the first."""
    return json.loads(STORED.read_text()) if STORED.exists() else {}


def times_table(runs: dict[str, Any]) -> str:
    """Each contestant of each case; in words that there is none, where no run is stored."""
    rows = [
        (
            f"{run['case']['batch']:,}",
            "bfloat16" if run["case"]["bf16"] else "float32",
            name,
            f"{figures['seconds']:.3f}",
            f"{figures['tokenising']:.3f}",
            f"{figures['before']:.3f}",
            f"{together(figures):.3f}",
            f"{together(run['found'][THEIRS]) / together(figures):.2f} ×",
        )
        for run in map(runs.get, CASES)
        if run is not None
        for name, figures in run["found"].items()
    ]
    header = ("batch", "products in", "trained with", "s a step", "of it tokenising", "before the first step")
    return table((*header, "together", "as fast"), rows) if rows else NO_RUN


def together(figures: dict[str, float]) -> float:
    """The seconds of a step with its share of what comes before the first one."""
    return figures["seconds"] + figures["before"]


def memory_table(runs: dict[str, Any]) -> str:
    """The peak of each process, by the batch."""
    if MEMORY not in runs:
        return NO_RUN
    by_batch = runs[MEMORY]["found"]
    rows = (
        (f"{int(batch):,}", *(mebibytes(peaks[name]) for name in CONTESTANTS))
        for batch, peaks in by_batch.items()
    )
    return table(("batch", *(f"{name} MiB" for name in CONTESTANTS)), rows)


def machine_line(runs: dict[str, Any]) -> str:
    """The machines of the stored runs, the libraries, and whether something else was running there."""
    if not runs:
        return NO_RUN
    lines = dict.fromkeys(
        f"{machine(run)}, {', '.join(f'{name} {number}' for name, number in run['versions'].items())}"
        for run in runs.values()
    )
    disturbed = dict.fromkeys(reason for run in runs.values() for reason in run["disturbed"])
    told = f" The machine was not quiet: {'; '.join(disturbed)}." if disturbed else ""
    return f"Measured on: {'; '.join(lines)}.{told}"


def measured(part: str, folder: Path) -> dict[str, Any]:
    """What is stored of a part."""
    if part == MEMORY:
        return {"found": {str(batch): peaks(batch, folder) for batch in OF_MEMORY}}
    return {"case": asdict(CASES[part]), "found": times(CASES[part], folder)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.static_trainer", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"store {STORED.name}")
    parts = (*CASES, MEMORY)
    parser.add_argument(
        "--parts", nargs="+", choices=parts, default=parts, help="what is measured (default: all)"
    )
    parser.add_argument("--peak", nargs=3, metavar=("NAME", "BATCH", "DIR"), help="print the bytes of one")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", metavar="DIR")
    options = parser.parse_args()
    if options.peak is not None:
        name, batch, folder = options.peak
        print(json.dumps(peak(name, int(batch), Path(folder))))
        return

    with tempfile.TemporaryDirectory() as folder:
        rows = max(*(case.rows for case in CASES.values()), STEPS_OF_MEMORY * max(OF_MEMORY))
        with lzma.open(options.data / "corpus" / "train.txt.xz", "rt", encoding="utf-8") as sentences:
            write_data(Path(folder), sentences, rows)
        for part in options.parts:
            watch = Watch()
            watch.probe()
            results = measured(part, Path(folder))
            watch.probe()
            libraries = {
                name: version(name) for name in ("sentence-transformers", "transformers", "tokenizers")
            }
            today = datetime.date.today().isoformat()
            about = {"machine_info": here(), "versions": libraries, "datetime": today}
            run = {**about, "disturbed": watch.reasons(), **results}
            if options.write:
                STORED.write_text(json.dumps(stored() | {part: run}, indent=1) + "\n")
    print("\n\n".join(show(stored()) for show in (times_table, memory_table, machine_line)))


if __name__ == "__main__":
    main()
