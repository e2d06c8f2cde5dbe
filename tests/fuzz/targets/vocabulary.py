"""vocabulary.json: one that is accepted encodes any text, and is written again as the same vocabulary."""

from __future__ import annotations

import json
from typing import Any

from fastqt.errors import InputError
from fastqt.sentences.text import TokenizerVocabulary, Vocabulary
from tests.fuzz.files import json_text, write
from tests.fuzz.refusals import check_file_refusal
from tests.fuzz.source import Bytes

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
    check_encoding(vocabulary, SENTENCES, unknown=unknown)
    return True


def check_encoding(
    vocabulary: Vocabulary | TokenizerVocabulary, sentences: list[str], **options: Any
) -> None:
    """Checks that a vocabulary encodes the sentences, and is the same when it is written and loaded again."""
    ids, lengths = vocabulary.encode(sentences)
    assert len(ids) == lengths.sum()
    assert (lengths >= 1).all()
    assert (lengths <= vocabulary.max_length).all()
    assert ((ids >= 0) & (ids < len(vocabulary))).all(), "an id outside the embedding table"

    again = type(vocabulary).load(write("again.json", vocabulary.to_json().encode()), **options)
    assert (again.encode(sentences).ids == ids).all()
