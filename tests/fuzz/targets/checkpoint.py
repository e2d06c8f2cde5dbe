"""model.safetensors and checkpoint.safetensors: whole, damaged, with other headers and other progress."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict

import torch
from safetensors.torch import save
from torch import nn

from fastqt.errors import InputError
from fastqt.sentences.runs import checkpoint
from fastqt.sentences.runs.config import FORMAT
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.runs.tensor_files import open_tensors
from tests.fuzz.files import json_text, write
from tests.fuzz.refusals import check_file_refusal
from tests.fuzz.source import Bytes

MODEL = nn.Linear(2, 3)
WEIGHTS = {name: tensor.clone() for name, tensor in MODEL.state_dict().items()}
PROGRESS = asdict(Progress(3, 1, 2.5, 9.5, 100, 40, (7, 8), ("a", "b"), "c", 0.5))
PROGRESS |= {"spans": [[[[0, 5, 1, 0], 20], [[1, 0, 3, 2], 15]], []]}


def _stored() -> dict[str, torch.Tensor]:
    optimizer = {
        f"optimizer.{key}.{name}": torch.zeros(() if key == "step" else tensor.shape)
        for key in ("step", "exp_avg", "exp_avg_sq")
        for name, tensor in WEIGHTS.items()
    }
    states = {"rng.cpu": torch.get_rng_state()}
    return {f"model.{name}": tensor for name, tensor in WEIGHTS.items()} | optimizer | states


METADATA = {"format": str(FORMAT), "progress": json.dumps(PROGRESS)}
CHECKPOINT, WHOLE = save(_stored(), METADATA), save(WEIGHTS)


def run_checkpoint(data: bytes) -> bool:
    source = Bytes(data)
    whole = source.choice((CHECKPOINT, WHOLE))
    content = _content(source, whole)
    if whole is WHOLE:
        return _read_model(content)

    path = write("checkpoint.safetensors", content)
    optimizer = torch.optim.Adam(MODEL.parameters())
    state = torch.get_rng_state()

    try:
        progress = checkpoint.read_progress(path)
        checkpoint.load_checkpoint(path, MODEL, optimizer)
    except InputError as error:
        check_file_refusal(error, path)
        return False
    finally:
        torch.set_rng_state(state)

    _check_progress(progress)
    for parameter in MODEL.parameters():
        for key, value in optimizer.state[parameter].items():
            assert value.shape == (() if key == "step" else parameter.shape), key
            assert value.dtype is torch.float32, key
    return True


def _read_model(content: bytes) -> bool:
    path = write("model.safetensors", content)
    try:
        with open_tensors(path) as file:
            shape = checkpoint.stored_shape(file, path, "weight")
            checkpoint.check_weights(file, path, MODEL.state_dict())
            checkpoint.load_weights(file, path, MODEL.state_dict())
    except InputError as error:
        check_file_refusal(error, path)
        return False
    assert shape == (3, 2)
    return True


def _content(source: Bytes, whole: bytes) -> bytes:
    length = struct.unpack("<Q", whole[:8])[0]
    header, payload = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    match source.choice(("bytes", "flips", "cut", "header", "progress")):
        case "bytes":
            return source.rest()
        case "flips":
            damaged = bytearray(whole)
            for _ in range(source.integer(1, 4)):
                damaged[source.integer(0, 65535) % len(damaged)] ^= source.integer(1, 255)
            return bytes(damaged)
        case "cut":
            return whole[: source.integer(0, len(whole))] + source.rest()
        case "header":
            text = json_text(source, header)
        case "progress":
            progress = json_text(source, PROGRESS).decode(errors="replace")
            text = json.dumps(header | {"__metadata__": METADATA | {"progress": progress}}).encode()
    return struct.pack("<Q", len(text)) + text + payload


def _check_progress(progress: Progress) -> None:
    for name in ("step", "epoch", "metrics_length", "sentences", "taken"):
        value = getattr(progress, name)
        assert type(value) is int, f"{name} is {value!r}"
        assert value >= 0, f"{name} is {value!r}"
    for name in ("seconds", "best"):
        assert type(getattr(progress, name)) in (int, float), f"{name} is {getattr(progress, name)!r}"
    assert all(type(size) is int for size in progress.corpus_bytes)
    for span in (span for share in progress.spans for span in share):
        assert type(span.sentences) is int
        assert span.sentences > 0
        assert all(type(x) is int for x in span.start)
