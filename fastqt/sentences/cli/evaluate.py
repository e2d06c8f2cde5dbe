"""fastqt evaluate: sentence vectors on the benchmarks of the literature, and on retrieval sets."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fastqt.errors import InputError
from fastqt.sentences.cli.command import AnyEncoding
from fastqt.sentences.options.commands import GRIDS, ProtocolOptions
from fastqt.sentences.options.option import option

if TYPE_CHECKING:
    from fastqt.sentences.evaluation.encoders import NamedEncoder
    from fastqt.sentences.evaluation.suite import Results
    from fastqt.sentences.inference.encoder import SentenceEncoder

RANDOM = "random"  # the baseline that is the same model with random weights


@dataclass(frozen=True, kw_only=True)
class Evaluate(AnyEncoding, ProtocolOptions):
    """MODEL is a directory that train wrote, or random:DIR for that model with random weights.

    Or it is a folder of sentence-transformers, word-vectors:FILE for the mean of word vectors, or
    sif:FILE,COUNTS for their SIF-weighted mean. The exit status is 1 if a task has failed.
    """

    title: ClassVar[str] = (
        "evaluate sentence vectors on the benchmarks of the literature, and on retrieval sets"
    )

    data: str = option(help="directory with one folder per task, or a set in BEIR's format", file="DIR")
    tasks: str | None = option(None, "tasks, as MR,CR,… (default: all in DIR)")
    baseline: str | None = option(
        None,
        "evaluate another encoder too, named as MODEL is, and show the difference to it; without a name the "
        "same model with random weights",
        file="ENCODER",
        alone=RANDOM,
    )
    json: str | None = option(None, "file for all results", file="OUT")
    grid: Literal["paper", "senteval"] = option("paper", "values of C: 2^0 to 2^8, or 2^-2 to 2^3")
    raw: bool = option(False, "do not scale vectors, or their halves, to norm 1")

    def run(self) -> int:
        try:
            from fastqt.sentences.evaluation import evaluate  # what needs the extra
            from fastqt.sentences.evaluation.vectors import say
        except ImportError as error:
            raise InputError(f"evaluate: {error}") from error
        from fastqt.sentences.inference.library_encoder import is_library_folder
        from fastqt.sentences.runs.files import check_can_be_written, check_ending

        if self.json is not None:
            check_ending(self.json, ".json")
            check_can_be_written(self.json)
        random = self.baseline == RANDOM
        if random and (is_library_folder(self.model) or not Path(self.model).is_dir()):
            raise InputError(f"baseline: want a directory that train wrote as MODEL, got {self.model}")
        about: dict[str, Any] = {"command": shlex.join(["fastqt", *sys.argv[1:]]), "model": self.model}

        def results_of(encoder: NamedEncoder, keep: Callable[[Results], object]) -> Results:
            tasks = None if self.tasks is None else self.tasks.split(",")
            options = asdict(self.part(ProtocolOptions))
            return evaluate(
                encoder.encode, self.data, tasks, grid=GRIDS[self.grid], after_task=keep, **options
            )

        def keep_baseline(results: Results) -> None:
            about["baseline"] = {"model": other, "identity": of_other.identity, **asdict(results)}
            self._save_on_the_way(of_model, about)

        encoder = self._load(self.model)
        about["identity"] = encoder.identity
        if self.baseline is not None:  # before any work, since there may be no such encoder
            other = f"random:{self.model}" if random else self.baseline
            of_other = self._load(other, encoder.of_run if random else None)
        of_model = results_of(encoder, lambda results: self._save_on_the_way(results, about))
        beside = None
        if self.baseline is not None:
            say("the same with random weights" if random else other)
            beside = results_of(of_other, keep_baseline)
        try:
            if self.json is not None:
                of_model.save(Path(self.json), **about)
        finally:  # what was computed is shown, even if it cannot be written
            print(of_model.table(beside, _short(self.baseline or RANDOM)), flush=True)
        return 1 if of_model.failed or (beside is not None and beside.failed) else 0

    def _load(self, name: str, like: SentenceEncoder | None = None) -> NamedEncoder:
        from fastqt.sentences.evaluation import load_encoder
        from fastqt.sentences.inference.encoder import chosen_inference

        how = chosen_inference(self)
        return load_encoder(name, device=self.device, raw=self.raw, seed=self.seed, inference=how, like=like)

    def _save_on_the_way(self, results: Results, about: dict[str, Any]) -> None:
        """Keeps what is known after a task in a file; a pipe is given the results once, at the end."""
        if self.json is not None and (Path(self.json).is_file() or not Path(self.json).exists()):
            with contextlib.suppress(InputError):  # the disk may have room again at the end
                results.save(Path(self.json), **about)


def _short(encoder: str) -> str:
    """The name of an encoder as the head of a column: of a path, the last part."""
    return Path(encoder).name or encoder
