"""vocabulary.json: one that is accepted encodes any text, and is written again as the same vocabulary."""

from __future__ import annotations

import json

from fastqt.errors import InputError
from fastqt.sentences.text import Vocabulary
from fuzz.files import json_text, write
from fuzz.refusals import check_file_refusal
from fuzz.source import Bytes

WHOLE = json.loads(Vocabulary.build(["one two, three! a b c"], 9, max_length=7).to_json())
SENTENCES = ["one two, three!", "", "  ", "a b c a b c a b c", "é \u2028 \x00 [UNK] <unk> x" + "y" * 200]


def run(data: bytes) -> bool:
    source = Bytes(data)
    unknown = source.choice(("keep", "drop"))
    path = write("vocabulary.json", json_text(source, WHOLE))
    try:
        vocabulary = Vocabulary.load(path, unknown=unknown)
    except InputError as error:
        check_file_refusal(error, path)
        return False
    ids, lengths = vocabulary.encode(SENTENCES)
    assert len(ids) == lengths.sum()
    assert (lengths >= 1).all()
    assert (lengths <= vocabulary.max_length).all()
    assert ((ids >= 0) & (ids < len(vocabulary))).all(), "an id outside the embedding table"
    again = Vocabulary.load(write("again.json", vocabulary.to_json().encode()), unknown=unknown)
    assert (again.encode(SENTENCES).ids == ids).all()
    return True
