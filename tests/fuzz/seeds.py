"""Writes the seeds of all targets: `python -m tests.fuzz.seeds`. The first bytes choose the make."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import random
from collections.abc import Iterator

import numpy as np

from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.text import Vocabulary
from tests.fuzz.files import XZ_FILTERS
from tests.fuzz.inputs import inputs, write
from tests.fuzz.targets.checkpoint import WHOLE
from tests.fuzz.targets.tokenizer import WHOLE as TOKENIZERS
from tests.fuzz.targets.word_vectors import WHOLE as WORD_VECTORS

TEXT = "\ufeffOne two, three!\nZwei — drei…\r\n\n  \nfour\u2028five\n\nsix".encode()
ROWS = b"one two\tthree\t(four)\n\nfive\tsix\tone\n"
VECTORS = b"the 0.5 -1e-3\nof 1 nan\n, 0 2"
COUNTS = b"the 100\nof 7"
TABLE = b"1\tone two\tthree\n0\tfour\tfive six"
SCORES = b"MSRpar\t3.5\tone two\tthree\nnews\t0\tfour\tfive"


def text_files(text: bytes) -> Iterator[bytes]:
    """What `files.text_file` makes a file of, for each of its makes."""
    yield b"\0" + text
    yield b"\1" + gzip.compress(text, mtime=0)
    yield b"\2" + lzma.compress(text, filters=XZ_FILTERS)
    yield from (bytes([make]) + text for make in (3, 4))
    yield b"\5\x20\0\1" + text
    yield b"\6\0\1\x07\x28" + text  # an xz file that wants a dictionary of 4 GiB
    yield b"\7\0\x10\0" + text + b"\n"


def seeds() -> dict[str, list[bytes]]:
    vocabulary = Vocabulary.build(["one two three , !"], 6, max_length=5).to_json()
    compact = json.dumps(json.loads(vocabulary)).encode()
    config = TrainConfig(("corpus.txt",), encoder="gru", word_dim=8, hidden_size=8).to_json()
    changes = [b"\0", b"\0\1\4\1\2", b"\1\2\3\1\0\x09", b"\2\1\7\2\1\5\3\2\1"]

    archive = io.BytesIO()
    np.savez(archive, words=["the", "of"], vectors=np.ones((2, 3), np.float32), counts=[4, 3])
    array = io.BytesIO()
    np.save(array, np.ones((3, 2), np.float32))

    npz = b"\2\0\2\1\0\1\0\0\x0ct\0\0\0h\0\0\0e\0\0\0\0\2\0\0\0\0\0\x10" + bytes(16)
    rng = random.Random(0)

    return {
        "corpus": [
            *(start + text for start in (b"\0\0", b"\1\2") for text in text_files(TEXT)),
            b"\0\0\0" + ROWS,
        ],
        "vocabulary": [b"\0\1" + compact, *(b"\1\0" + change for change in changes)],
        "tokenizer": [
            *(
                bytes([option, kind, 0]) + change
                for option in range(3)
                for kind in range(3)
                for change in changes
            ),
            *(b"\0\0\1" + json.dumps(whole).encode() for whole in TOKENIZERS),
        ],
        "config": [
            b"\0\1\7\1" + json.dumps(json.loads(config)).encode(),
            *(
                bytes([model, encoder, 7, 0]) + changes[encoder % 4]
                for model in range(5)
                for encoder in range(7)
            ),
            *(bytes([0, encoder, 7, 0]) + changes[encoder % 4] for encoder in range(7, 11)),
        ],
        "checkpoint": [
            b"\1\0" + WHOLE,
            *(
                bytes([kind, change]) + rest
                for kind in range(2)
                for change in range(1, 5)
                for rest in changes
            ),
        ],
        "vectors": [
            *(b"\0" + text for text in text_files(VECTORS)),
            *(b"\1" + text for text in text_files(COUNTS)),
            npz,
            npz[:20],
            b"\3" + archive.getvalue(),
        ],
        "word_vectors": [
            b"\0\1" + json.dumps(WORD_VECTORS).encode(),
            *(b"\0\0" + change for change in changes),
            b"\1\7" + bytes([len(array.getvalue())]) + array.getvalue(),
            *(b"\1" + npz[start:] for start in (4, 5, 6)),
        ],
        "evaluation": [
            *(b"\0" + text for text in text_files(TABLE)),
            *(b"\1" + text for text in text_files(SCORES)),
            *(b"\2" + text for text in text_files(TABLE)),
            b'\3\0\2\0\1["one", "two", "three"]',
            b"\3\1" + npz[1:],
            *(b"\3\0\2\0\0" + change for change in changes),
        ],
        "contrastive_loss": [bytes([kind]) + rng.randbytes(100) for kind in (0, 1) for _ in range(40)],
    }


def main() -> None:
    for target, made in seeds().items():
        numbered = {f"seeds/{number:02}": data for number, data in enumerate(dict.fromkeys(made))}
        write(target, inputs(target, "regressions") | numbered)


if __name__ == "__main__":
    main()
