"""A damaged config.json is refused with the name of the field, and old ones are read."""

import json
import subprocess
import sys

import pytest

from fastqt.errors import InputError
from fastqt.sentences.runs.config import TrainConfig

CONFIG = TrainConfig(("x.txt",), encoder="gru", steps=3)


def write(path, change):
    path.write_text(json.dumps(json.loads(CONFIG.to_json()) | change))


def test_settings_are_read_as_they_were_written(tmp_path):
    write(tmp_path / "config.json", {})
    assert TrainConfig.load(tmp_path / "config.json") == CONFIG


def test_settings_that_an_older_version_did_not_have_get_their_defaults(tmp_path):
    values = json.loads(CONFIG.to_json())
    del values["latents"], values["dev"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert TrainConfig.load(tmp_path / "config.json") == CONFIG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 10**9}, "hidden_size: want at least 1 and less than 16777217, got 1000000000"),
        ({"hidden_size": "8"}, "hidden_size: want an integer, got '8'"),
        ({"hidden_size": 8.0}, r"hidden_size: want an integer, got 8\.0"),
        ({"hidden_size": True}, "hidden_size: want an integer, got True"),
        ({"hidden_size": None}, "hidden_size: want an integer, got None"),
        ({"hidden_size": [8]}, r"hidden_size: want an integer, got \[8\]"),
        ({"layers": 10**6}, "layers: want at least 1 and less than 257"),
        ({"dropout": float("nan")}, "dropout: want at least 0 and less than 1, got nan"),
        ({"learning_rate": "fast"}, "learning_rate: want a number, got 'fast'"),
        ({"model": None}, "model: want a text, got None"),
        ({"encoder": ["gru"]}, r"encoder: want a text, got \['gru'\]"),
        ({"model": "x" * 999}, "model: want one of quickthoughts, "),
        ({"seed": 2**80}, "seed: want at least 0 and less than"),
        ({"corpus": "x.txt"}, "corpus: want paths, got 'x.txt'"),
        ({"corpus": [1]}, r"corpus: want paths, got \(1,\)"),
        ({"corpus": None}, "corpus: want paths, got None"),
        ({"corpus": []}, "corpus: want at least one file"),
        ({"format": None}, "format is missing"),
        ({"format": "1"}, "has format '1'"),
        ({"format": True}, "has format True"),
        ({"fastqt": None}, "fastqt is missing"),
        ({"colour": "red"}, "unknown 'colour'"),
    ],
    ids=str,
)
def test_a_damaged_field_is_named(tmp_path, change, message):
    write(tmp_path / "config.json", change)
    with pytest.raises(InputError, match=rf"config\.json.*{message}"):
        TrainConfig.load(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Expecting value"),
        (b"[]", "want an object, got a list"),
        (b"3", "want an object, got 3"),
        (b'{"format": 1, "format": 1}', "the key 'format' occurs twice"),
        (b'{"format": "\xff"}', "can't decode byte 0xff"),
        (b"[" * 200_000, "recursion"),
        (b'{"format": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b" " * (1 << 20) + b" ", "want at most 1,048,576 bytes, got 1,048,577"),
    ],
    ids=range(8),
)
def test_a_file_that_is_no_json_object_is_refused(tmp_path, data, message):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(InputError, match=rf"config\.json.*{message}"):
        TrainConfig.load(tmp_path / "config.json")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InputError, match=r"cannot read .*config\.json: Is a directory"):
        TrainConfig.load(tmp_path / "config.json")


def test_settings_are_read_without_torch():
    """The command line makes its options from them, and answers --help before torch could be imported."""
    program = "import sys, fastqt.sentences.runs.config; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
