"""What the parts of figures share: parts are made and stored one by one, as the runs of the tables are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import scipy
import sklearn

from benchmarks.measure.machine import processor_and_versions
from benchmarks.papers.plans import TABLES
from benchmarks.papers.runs import Places, add_words, encoder_name, train
from benchmarks.papers.store import Planned
from fastqt.sentences.evaluation.encoders import NamedEncoder, load_encoder


class NotReadyError(Exception):
    """A part needs runs that are not stored, or whose models are not in the work folder."""


class Part(Planned, Protocol):
    """A part of a figure."""

    def perform(self, places: Places) -> dict[str, Any]:
        """Makes the part.

        Args:
            places: where the files are.

        Returns:
            The record to store: `settings`, `made`, and the results.

        Raises:
            NotReadyError: it needs what is not there yet.
        """


def made() -> dict[str, Any]:
    """When, where and with which versions a part was made."""
    versions = {"numpy": np.__version__, "scipy": scipy.__version__, "scikit-learn": sklearn.__version__}
    return processor_and_versions() | versions


def trained(table: str, name: str, places: Places) -> Path:
    """The folder of a table's run, which is trained to its end if it is not there."""
    run = next(run for run in TABLES[table] if run.name == name)
    folder = places.work / table / (run.folder or run.name)
    train(run, folder, places)
    return folder


def expanded(folder: Path, places: Places) -> Path:
    """The folder of a model with the words of GloVe added to its vocabulary."""
    target = places.work / "expanded" / folder.parent.name / folder.name
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(add_words(str(folder), "@glove", target, places))


def load(encoder: str, places: Places) -> NamedEncoder:
    """Loads what a part names.

    Args:
        encoder: as `fastqt evaluate` takes it, with files as in `Places.resolve`; a model of a table is
            @TABLE/NAME, random:@TABLE/NAME with random weights, or expanded:@TABLE/NAME.
        places: where the files are.
    """
    kind, colon, rest = encoder.rpartition(":")
    table, slash, name = rest.removeprefix("@").partition("/")
    if not slash or table not in TABLES:
        return load_encoder(encoder_name(encoder, places))
    folder = trained(table, name, places)
    if kind == "expanded":
        return load_encoder(str(expanded(folder, places)))
    return load_encoder(f"{kind}{colon}{folder}")
