"""config.json: one that is accepted has values of the declared types, is written again and builds a model."""

from __future__ import annotations

import dataclasses
import json
import math
from types import NoneType

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.options.encoders import ENCODERS
from fastqt.sentences.options.option import options_of
from fastqt.sentences.runs.config import KINDS, TrainConfig
from fastqt.sentences.text import Vocabulary
from tests.fuzz.files import folder, json_text, write
from tests.fuzz.refusals import UnhelpfulRefusalError, check_file_refusal
from tests.fuzz.source import Bytes

TYPES = {
    name: (tuple if each.count != 1 else each.kind, *([NoneType] if each.optional else []))
    for name, each in options_of(TrainConfig).items()
}
SIZES = ("word_dim", "hidden_size", "layers", "heads", "feedforward", "max_length")
TINY = {"word_dim": 8, "hidden_size": 8, "layers": 1, "heads": 2, "feedforward": 8, "max_length": 9}
VOCABULARY = Vocabulary.build(["one two three"], 4).to_json().encode()
LARGEST = 64  # a model whose sizes are no larger is built in less than a millisecond
IMPOSSIBLE = 10**12  # no machine holds a model of this size


def run_config(data: bytes) -> bool:
    source = Bytes(data)
    model = source.choice(tuple(KINDS))
    kind = ENCODERS[source.choice(KINDS[model].encoders)]
    encoder = kind.name

    files = {name: f"{name}.npz" for name in kind.needs}
    whole = TrainConfig(("corpus.txt",), model=model, encoder=encoder, **files, **TINY)

    builds = source.integer(0, 7) == 7  # a model, which takes most of the time
    path = write("config.json", json_text(source, json.loads(whole.to_json())))

    try:
        config = TrainConfig.load(path)
    except InputError as error:
        check_file_refusal(error, path)
        return False

    for name, types in TYPES.items():
        _check_value(name, getattr(config, name), types)
    assert TrainConfig.load(write("again.json", config.to_json().encode())) == config

    if builds and config.encoder != "huggingface":
        _check_model(config)
    return True


def _check_value(name: str, value: object, types: tuple[type, ...]) -> None:
    assert type(value) in types or (type(value) is int and float in types), f"{name} is {value!r}"
    assert not isinstance(value, float) or math.isfinite(value), f"{name} is {value!r}"
    assert value is not None or NoneType in types or name in dataclasses.asdict(TrainConfig(("x",)))
    if name == "corpus":
        assert all(type(file) is str for file in value)


def _check_model(config: TrainConfig) -> None:
    """A model of reasonable sizes is built; one that no memory holds is refused."""
    sizes = [getattr(config, name) for name in SIZES]
    if LARGEST < max(sizes) < IMPOSSIBLE or 4 < config.layers < IMPOSSIBLE:
        return
    vocabulary = write("vocabulary.json", VOCABULARY)
    try:
        SentenceEncoder.load(folder(), "cpu", trained=False)
    except InputError as error:
        check_file_refusal(error, folder() / "config.json", vocabulary)
        if max(sizes) <= LARGEST:
            raise UnhelpfulRefusalError("a small model is refused") from error
