"""The files of a run: the names, and how the checkpoint and the model are written and read."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastqt.errors import InputError, one_line
from fastqt.machine.memory import MIB
from fastqt.optim.replay import WINDOW
from fastqt.sentences.json_text import parse_object, to_json
from fastqt.sentences.runs.config import FORMAT, TrainConfig
from fastqt.sentences.runs.files import write_atomically
from fastqt.sentences.runs.progress import Progress, parse_progress
from fastqt.sentences.runs.tensor_files import metadata_of, open_tensors, save_tensors

CONFIG, VOCABULARY, MODEL = "config.json", "vocabulary.json", "model.safetensors"
METRICS, CHECKPOINT = "metrics.jsonl", "checkpoint.safetensors"
EVALUATION = "evaluation.json"
CARD = "README.md"
FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors names them


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically, as UTF-8."""
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def save_model(path: Path, model: nn.Module) -> None:
    """Writes a model's weights atomically."""
    save_tensors(path, model.state_dict())


def generator_states() -> dict[str, Tensor]:
    """The states of torch's random number generators in this process, by device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    generators: Sequence[Mapping[str, Tensor]] | None = None,
) -> None:
    """Writes everything that a training needs to continue as if it had not been stopped.

    That includes the states of torch's random number generators: the `generator_states` of each rank, by
    default those of this process alone. The progress is in the file's metadata.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{key}.{name}"] = value
    for rank, states in enumerate(generators or [generator_states()]):
        tensors |= {_generator_name(device, rank): state for device, state in states.items()}
    save_tensors(path, tensors, {"format": str(FORMAT), "progress": to_json(asdict(progress))})


def _generator_name(device: str, rank: int) -> str:
    """The name of a generator's state in the file. One process writes the names without a rank."""
    return f"rng.{device}.{rank}" if rank else f"rng.{device}"


def read_progress(path: Path) -> Progress:
    """Reads the progress from a checkpoint, without its tensors."""
    with open_tensors(path) as file:
        metadata = metadata_of(file)
    if metadata.keys() != {"format", "progress"} or metadata["format"] != str(FORMAT):
        raise InputError(f"{path} is not a checkpoint of this version of fastqt")
    return parse_progress(parse_object(metadata["progress"], path), path)


def check_space(directory: Path, model: nn.Module) -> None:
    """Refuses to train where the disk has no room for the model and a checkpoint.

    A checkpoint has the weights once more and two moments of each. Both are written beside what they replace.
    """
    needed = 4 * sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    if (free := shutil.disk_usage(directory).free) < needed:
        raise InputError(
            f"{directory}: want {-(-needed // MIB):,} MiB of free disk for the model and a checkpoint, got "
            f"{free // MIB:,} MiB"
        )


def standing(directory: Path, config: TrainConfig) -> str:
    """Where a training stands that has not ended, in words; "" for one that has, and where nothing says it.

    A training that has ended has no checkpoint, or with keep_checkpoint one of its last step.
    """
    path = directory / CHECKPOINT
    if not path.exists():
        return ""
    try:
        progress = read_progress(path)
    except InputError:  # is told when the training is resumed; the model beside it may be whole
        return ""
    epochs_left = config.epochs - progress.epoch - (progress.sentences - progress.taken < config.batch_size)
    steps_left = math.inf if config.steps is None else config.steps - progress.step
    if min(epochs_left, steps_left) <= 0 or (config.early_stop or math.inf) <= progress.since_best:
        return ""
    steps = "" if config.steps is None else f" of {config.steps:,}"
    return f"step {progress.step:,}{steps}, in epoch {progress.epoch + 1:,} of {config.epochs:,}"


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, verified: bool = False
) -> None:
    """Restores a model, its optimiser and torch's random number generators from a checkpoint, in place.

    `verified` is as of `open_tensors`.
    """
    with open_tensors(path, verified=verified) as file:
        names = set(file.keys())
        weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        _check_tensors(file, path, weights)
        for name, tensor in weights.items():
            tensor.copy_(file.get_tensor(name))

        # An optimiser that treats rows as parameters counts the steps of each of them.
        counts_rows = any(group.get("rows") == "touched" for group in optimizer.param_groups)
        for name, parameter in model.named_parameters():
            like = {"step": torch.zeros((), device="cpu"), "exp_avg": parameter, "exp_avg_sq": parameter}
            # Where rows of a table are behind; an older version has stored none that are.
            like["last"] = torch.zeros(
                len(parameter) if parameter.dim() else 0, dtype=torch.int64, device="cpu"
            )
            like["rates"] = torch.zeros(WINDOW, 2, dtype=torch.float64, device="cpu")
            for key, wanted in like.items():
                if (stored := f"optimizer.{key}.{name}") in names:
                    # safetensors returns a tensor that maps the file; a copy does not depend on the file.
                    value = file.get_tensor(stored).to(parameter.device, copy=True)
                    of_rows = key == "step" and counts_rows and value.shape == parameter.shape[:1]
                    if value.dtype != wanted.dtype or not (of_rows or value.shape == wanted.shape):
                        raise InputError(
                            f"{path}: {stored}: want shape {tuple(wanted.shape)} of {wanted.dtype}, "
                            f"got {tuple(value.shape)} of {value.dtype}"
                        )
                    optimizer.state[parameter][key] = value

        states = _generators(file, 0)
    set_generator_states(states, path)


def read_generators(path: Path, *, verified: bool = False) -> list[dict[str, Tensor]]:
    """Reads the states of the random number generators of each rank from a checkpoint."""
    with open_tensors(path, verified=verified) as file:
        ranks = sum(name.startswith("rng.cpu") for name in file.keys())  # noqa: SIM118  # it is no dict
        return [_generators(file, rank) for rank in range(ranks)]


def _generators(file: Any, rank: int) -> dict[str, Tensor]:
    names = set(file.keys())
    return {
        device: file.get_tensor(_generator_name(device, rank)).clone()
        for device in ("cpu", "cuda")
        if device == "cpu" or _generator_name(device, rank) in names
    }


def set_generator_states(states: Mapping[str, Tensor], path: Path) -> None:
    """Restores what `generator_states` returned, by device, but for devices that are not here.

    `path` is the file that the states come from, for the message.
    """
    try:
        torch.set_rng_state(states["cpu"])
        if torch.cuda.is_available() and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{path} is damaged: rng: want the state of a generator: {error}") from error


def load_weights(file: Any, path: Path, weights: Mapping[str, Tensor]) -> None:
    """Loads finite weights into those of a model that fits, from an open file that `save_model` wrote."""
    for name, tensor in weights.items():
        stored = file.get_tensor(name)
        if not stored.isfinite().all():
            raise InputError(
                f"{path}: {name}: want finite numbers, got NaN or infinity, as of a training that has "
                "diverged: train again with a lower learning_rate"
            )
        tensor.copy_(stored)


def check_weights(file: Any, path: Path, weights: Mapping[str, Tensor]) -> None:
    """Checks that an open file that `save_model` wrote holds certain weights, without reading their values.

    The names and shapes are what is wanted; the tensors may be on the device "meta".
    """
    names = set(file.keys())
    if names != set(weights):
        different = ", ".join(sorted(names.symmetric_difference(weights)))
        raise InputError(
            f"{path} does not fit its config.json: only one of them has {one_line(different, 1000)}"
        )
    _check_tensors(file, path, weights)


def _check_tensors(file: Any, path: Path, weights: Mapping[str, Tensor]) -> None:
    names = set(file.keys())
    for name, tensor in weights.items():
        if name not in names:
            raise InputError(f"{path} does not fit its config.json: {name} is missing")
        stored = file.get_slice(name)
        if tuple(stored.get_shape()) != tensor.shape:
            raise InputError(f"{path} does not fit its config.json: the shape of {name} differs")
        if tensor.is_floating_point() and stored.get_dtype() not in FLOATS:
            raise InputError(f"{path}: {name}: want one of {', '.join(FLOATS)}, got {stored.get_dtype()}")


def stored_shape(file: Any, path: Path, name: str) -> tuple[int, ...]:
    """The shape of one tensor in an open file that `save_model` wrote."""
    if name not in set(file.keys()):
        raise InputError(f"{path} does not fit its config.json: {name} is missing")
    return tuple(file.get_slice(name).get_shape())
