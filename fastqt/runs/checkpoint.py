"""Reads and writes the files of a run. Every file is written atomically: completely, or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fastqt.errors import InputError
from fastqt.runs.config import FORMAT
from fastqt.text import Position

CONFIG, VOCABULARY, MODEL = "config.json", "vocabulary.json", "model.safetensors"
METRICS, CHECKPOINT, CORPUS = "metrics.jsonl", "checkpoint.safetensors", "corpus.txt"
EVALUATION = "evaluation.json"


@dataclass
class Progress:
    """The progress of a training: everything in a checkpoint that is not a tensor."""

    step: int = 0
    epoch: int = 0
    position: Position | None = None  # in the corpus; None at the start of an epoch
    seconds: float = 0.0  # of training so far, including the time before it was resumed
    metrics_length: int = 0  # bytes of metrics.jsonl
    sentences: int = 0  # in one epoch
    corpus_bytes: tuple[int, ...] = ()  # the size of each file of the corpus
    best: float = -math.inf  # highest Spearman coefficient so far on the development pairs


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to, and then moves that file to `path`.

    After a crash or a power cut, `path` is the old file or the complete new one.

    Args:
        path: the file to replace or to create; its directory must exist.
    """
    partial = path.with_name(path.name + ".partial")
    partial.touch()
    mode = partial.stat().st_mode
    try:
        yield partial
        partial.chmod(mode)  # safetensors creates files that only their owner can read
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically, as UTF-8."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def save_model(path: Path, model: nn.Module) -> None:
    """Writes a model's weights atomically."""
    with replacing(path) as partial:
        save_file(_contiguous(model.state_dict()), partial)


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Writes everything that a training needs to continue as if it had not been stopped.

    That includes the states of torch's random number generators.

    Args:
        path: the file to write.
        model: its parameters and buffers are stored.
        optimizer: the state of each of the model's parameters is stored.
        progress: stored in the file's metadata.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{key}.{name}"] = value
    tensors["rng.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    with replacing(path) as partial:
        save_file(
            _contiguous(tensors), partial, {"format": str(FORMAT), "progress": json.dumps(asdict(progress))}
        )


def read_progress(path: Path) -> Progress:
    """Reads the progress from a checkpoint, without its tensors.

    Raises:
        InputError: the file is missing or damaged, or another version of fastqt wrote it.
    """
    with _open_safetensors(path) as file:
        metadata = file.metadata() or {}
    if metadata.get("format") != str(FORMAT):
        raise InputError(f"{path} is not a checkpoint of this version of fastqt")
    values = json.loads(metadata["progress"])
    position = values.pop("position")
    sizes = tuple(values.pop("corpus_bytes"))
    return Progress(**values, position=position and Position(*position), corpus_bytes=sizes)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restores a model, its optimiser and torch's random number generators from a checkpoint.

    Args:
        path: a file that `save_checkpoint` wrote.
        model: of the same shapes as the stored one; it is changed in place.
        optimizer: the optimiser of the model's parameters; its state is filled.

    Raises:
        InputError: the file is missing or damaged.
    """
    with _open_safetensors(path) as file:
        names = set(file.keys())
        model.load_state_dict({name: file.get_tensor(f"model.{name}") for name in model.state_dict()})
        for name, parameter in model.named_parameters():
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if (stored := f"optimizer.{key}.{name}") in names:
                    # safetensors returns a tensor that maps the file; a copy does not depend on the file.
                    optimizer.state[parameter][key] = file.get_tensor(stored).to(parameter.device, copy=True)
        torch.set_rng_state(file.get_tensor("rng.cpu"))
        if torch.cuda.is_available() and "rng.cuda" in names:
            torch.cuda.set_rng_state(file.get_tensor("rng.cuda"))


def load_model(path: Path, model: nn.Module) -> None:
    """Loads weights that `save_model` wrote.

    Args:
        path: the file.
        model: of the same names and shapes as the stored model; it is changed in place.

    Raises:
        InputError: the file is missing or damaged, or its names or shapes differ from the model's.
    """
    with _open_safetensors(path) as file:
        weights, names = model.state_dict(), set(file.keys())
        if names != set(weights):
            different = ", ".join(sorted(names.symmetric_difference(weights)))
            raise InputError(f"{path} does not fit its config.json: only one of them has {different}")
        for name, tensor in weights.items():
            stored = file.get_tensor(name)
            if stored.shape != tensor.shape:
                raise InputError(f"{path} does not fit its config.json: the shape of {name} differs")
            tensor.copy_(stored)


def stored_shape(path: Path, name: str) -> tuple[int, ...]:
    """Reads the shape of one tensor in a file that `save_model` wrote.

    Raises:
        InputError: the file or the tensor is missing, or the file is damaged.
    """
    with _open_safetensors(path) as file:
        if name not in set(file.keys()):
            raise InputError(f"{path} does not fit its config.json: {name} is missing")
        return tuple(file.get_slice(name).get_shape())


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


@contextlib.contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise InputError(f"{path.name} is missing in {path.parent}") from None
    except SafetensorError as error:
        raise InputError(f"{path} is damaged: {error}") from error
