"""Vocabularies and tokenizers: one that is accepted encodes any text, and is written again as the same."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from fastqt.errors import InputError
from fastqt.sentences.text import Vocabulary
from tests.fuzz.files import json_text, write
from tests.fuzz.refusals import check_file_refusal
from tests.fuzz.source import Bytes

WHOLE = json.loads(Vocabulary.build(["one two, three! a b c"], 9, max_length=7).to_json())
SENTENCES = [
    "one two, three!",
    "",
    "  ",
    "a b c ab ab c a b c a b c",
    "é \u2028 \x00 [UNK] <unk> x" + "y" * 200,
]
PIECES = ["<unk>", "a", "b", "c", "##b", "one", "two", "ab", ",", "!"]


def _made() -> list[dict[str, object]]:
    ids = {piece: number for number, piece in enumerate(PIECES)}
    bpe = Tokenizer(models.BPE(ids, [("a", "b")], unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits()])
    bpe.enable_padding(pad_id=1, pad_token="a")
    words = Tokenizer(models.WordPiece(ids, unk_token="<unk>"))
    words.normalizer, words.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words.post_processor = processors.TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 0)])
    words.add_special_tokens(["<unk>"])
    unigram = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(PIECES)], unk_id=0))
    unigram.normalizer = normalizers.Sequence([normalizers.Replace(Regex(" {2,}"), " "), normalizers.NFKC()])
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    return [json.loads(each.to_str()) for each in (bpe, words, unigram)]


TOKENIZERS = _made()


def run_vocabulary(data: bytes) -> bool:
    source = Bytes(data)
    unknown = source.choice(("keep", "drop"))
    path = write("vocabulary.json", json_text(source, WHOLE))
    try:
        read = Vocabulary.load(path, unknown=unknown)
    except InputError as error:
        check_file_refusal(error, path)
        return False
    check_encoding(read, unknown=unknown)
    return True


def run_tokenizer(data: bytes) -> bool:
    source = Bytes(data)
    options = source.choice(({}, {"unknown": "drop"}, {})) | {"max_length": 7}
    path = write("tokenizer.json", json_text(source, source.choice(TOKENIZERS)))
    try:
        read = Vocabulary.load(path, **options)
    except InputError as error:
        check_file_refusal(error, path)
        return False
    check_encoding(read, **options)
    return True


def check_encoding(read: Vocabulary, **options: Any) -> None:
    """Checks that a vocabulary encodes sentences, and is the same when it is written and loaded again."""
    ids, lengths = read.encode(SENTENCES)
    assert len(ids) == lengths.sum()
    assert (lengths >= 1).all()
    assert (lengths <= read.max_length).all()
    assert ((ids >= 0) & (ids < len(read))).all(), "an id outside the embedding table"

    again = Vocabulary.load(write("again.json", read.to_json().encode()), **options)
    assert (again.encode(SENTENCES).ids == ids).all()
