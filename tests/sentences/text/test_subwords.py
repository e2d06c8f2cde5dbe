"""Tokenizer files against the library itself, their options, and files that must be refused."""

import json
import pickle

import pytest
from tokenizers import Tokenizer

from fastqt.errors import InputError
from fastqt.sentences.text import TokenizerVocabulary, Vocabulary
from tests.shared.tokenizer_files import TOKENIZERS, bpe, unigram, word_piece

TEXTS = ["topic1word2 place3", "", "a cat  sat.", "Ünïcödé ☃ zzz", "cats " * 30, "[SEP] topic"]
each_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


@pytest.fixture
def write(tmp_path):
    def written(tokenizer) -> str:
        path = tmp_path / "tokenizer.json"
        text = json.dumps(tokenizer) if isinstance(tokenizer, dict) else tokenizer.to_str()
        path.write_text(text, encoding="utf-8")
        return str(path)

    return written


def rows(encoded):
    ids = iter(encoded.ids.tolist())
    return [[next(ids) for _ in range(length)] for length in encoded.lengths]


def by_the_library(tokenizer: Tokenizer, *, special=False):
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [tokenizer.encode(text, add_special_tokens=special).ids for text in TEXTS]


@each_tokenizer
def test_ids_are_those_of_the_library(write, name):
    made = TOKENIZERS[name]()
    vocabulary = TokenizerVocabulary.load(write(made), max_length=20)
    # "" has no token; without an unknown token, the padding token takes its place.
    wanted = [ids[:20] or [vocabulary.filler] for ids in by_the_library(made)]
    assert rows(vocabulary.encode(TEXTS)) == wanted
    assert vocabulary.filler == {"bpe": 263, "word_piece": 1, "unigram": 0}[name]
    assert len(vocabulary) == made.get_vocab_size()
    again = pickle.loads(pickle.dumps(vocabulary))
    assert rows(again.encode(TEXTS)) == wanted


@each_tokenizer
@pytest.mark.parametrize("options", [{}, {"unknown": "drop"}, {"special_tokens": "add"}], ids=str)
def test_what_is_saved_is_the_same_vocabulary(write, tmp_path, name, options):
    vocabulary = TokenizerVocabulary.load(write(TOKENIZERS[name]()), max_length=9, **options)
    vocabulary.save(tmp_path / "saved.json")
    again = TokenizerVocabulary.load(tmp_path / "saved.json", max_length=9, **options)
    assert rows(again.encode(TEXTS)) == rows(vocabulary.encode(TEXTS))
    assert again.to_json() == vocabulary.to_json()
    assert (again.filler, len(again)) == (vocabulary.filler, len(vocabulary))


def test_special_tokens_are_added_when_asked_for(write):
    path = write(word_piece())
    found = rows(TokenizerVocabulary.load(path, max_length=6, special_tokens="add").encode(TEXTS))
    for ids, whole in zip(found, by_the_library(word_piece(), special=True), strict=True):
        assert ids == (whole if len(whole) <= 6 else [*whole[:5], 3])  # what is cut keeps [SEP]
    assert found[1] == [2, 3]
    with pytest.raises(InputError, match="max_length: want at least 3, got 2"):
        TokenizerVocabulary.load(path, max_length=2, special_tokens="add")


@pytest.mark.parametrize(("name", "ids"), [("bpe", [263]), ("word_piece", [0, 1, 2, 3]), ("unigram", [0])])
def test_special_ids_are_of_tokens_that_no_text_has(write, name, ids):
    assert TokenizerVocabulary.load(write(TOKENIZERS[name]())).special_ids() == ids


def test_unknown_tokens_are_dropped_before_sentences_are_cut(write):
    vocabulary = TokenizerVocabulary.load(write(word_piece()), unknown="drop", max_length=2)
    assert rows(vocabulary.encode(["☃ ☃ a ☃ cat a", "☃"])) == [[8, 9], [1]]


def test_ids_need_not_be_without_gaps(write):
    state = json.loads(word_piece().to_str())
    state["model"]["vocab"]["late"] = 1000
    vocabulary = TokenizerVocabulary.load(write(state))
    assert len(vocabulary) == 1001
    assert rows(vocabulary.encode(["late"])) == [[1000]]


def test_a_vocabulary_of_words_is_a_tokenizer_file(tmp_path):
    words = Vocabulary.build(TEXTS, 9)
    words.save(tmp_path / "vocabulary.json")
    found = TokenizerVocabulary.load(tmp_path / "vocabulary.json")
    assert rows(found.encode(TEXTS)) == rows(words.encode(TEXTS))


def replaced(pattern, content="x"):
    return {"type": "Replace", "pattern": pattern, "content": content}


def changed(state, path, value):
    *above, last = path.split(".")
    for name in above:
        state = state[name]
    state[last] = value


@pytest.mark.parametrize(
    ("make", "path", "value", "message"),
    [
        (
            bpe,
            "model.type",
            "Words",
            r"model\.type: want one of BPE, WordPiece, Unigram, WordLevel, got 'Words'",
        ),
        (bpe, "model", None, "model: want an object, got None"),
        (bpe, "model.dropout", 0.1, r"model\.dropout: want null, got 0\.1"),
        (bpe, "model.merges", [["x", "yy"]], "out of vocabulary"),
        (bpe, "model.vocab", {"a": 1 << 31}, r"model\.vocab: want ids below|out of vocabulary"),
        (bpe, "padding.pad_id", 5000, r"padding\.pad_id: want less than 264, got 5,000"),
        (bpe, "padding.pad_id", "0", r"padding\.pad_id: want an id, got '0'"),
        (unigram, "model.unk_id", None, r"model\.unk_id: want the id of the unknown token, got None"),
        (unigram, "model.unk_id", 500, "UnkIdNotInVocabulary"),
        (unigram, "model.vocab", [], "EmptyVocabulary"),
        (word_piece, "model.unk_token", "[NONE]", r"\[UNK\]|not found"),
        (bpe, "normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "Precompiled: "),
        (bpe, "normalizer", {"type": "Magic"}, "normalizer: want one of BertNormalizer, .*got "),
        (bpe, "normalizer", [3], "normalizer: want one of BertNormalizer, .*got "),
        (
            bpe,
            "normalizer",
            {"type": "Sequence", "normalizers": [3]},
            r"normalizer\[0\]: want one of .*got 3",
        ),
        (bpe, "normalizer", {"type": "Sequence"}, "normalizer is damaged: normalizers is missing"),
        (bpe, "normalizer", replaced({"Regex": "(a+)+b"}), r"normalizer\.pattern: want a text, or a regular"),
        (bpe, "normalizer", replaced({"String": ""}), r"normalizer\.pattern: want a text, or a regular"),
        (
            bpe,
            "normalizer",
            replaced({"String": "a"}, "a" * 65),
            "want at most 64 characters for one, got 65",
        ),
        (
            bpe,
            "normalizer",
            {"type": "Sequence", "normalizers": [replaced({"String": "a"}, "aa")] * 30},
            "want at most 64 characters for one, got 1,073,741,824",
        ),
        (
            bpe,
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False},
            r"pre_tokenizer\.pattern: want a text, or a regular",
        ),
    ],
)
def test_broken_files_are_refused_by_field(write, make, path, value, message):
    state = json.loads(make().to_str())
    changed(state, path, value)
    file = write(state)
    with pytest.raises(InputError, match=message) as caught:
        TokenizerVocabulary.load(file)
    assert str(caught.value).startswith(f"{file} is no usable tokenizer file: ")
    assert "\n" not in str(caught.value)


def test_a_post_processor_that_fails_is_refused_where_it_is_used(write):
    state = json.loads(bpe().to_str())
    single = [{"SpecialToken": {"id": "X", "type_id": 0}}]
    state["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}
    }  # fmt: skip
    file = write(state)
    TokenizerVocabulary.load(file)
    with pytest.raises(InputError, match="is no usable tokenizer file"):
        TokenizerVocabulary.load(file, special_tokens="add")


def test_files_that_are_no_json_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(InputError, match=r"no vocabulary: .*tokenizer\.json is missing"):
        TokenizerVocabulary.load(path)
    for text in ("", "{", "[]", "[" * 100_000, '{"a": 1, "a": 2}'):
        path.write_text(text)
        with pytest.raises(InputError, match=r"tokenizer\.json is damaged"):
            TokenizerVocabulary.load(path)
    monkeypatch.setattr("fastqt.sentences.text.subwords.LARGEST_FILE", 10)
    path.write_text(bpe().to_str())
    with pytest.raises(InputError, match=r"tokenizer\.json: want at most 10 bytes, got"):
        TokenizerVocabulary.load(path)


def test_wrong_options_are_refused():
    with pytest.raises(InputError, match="unknown: want 'keep' or 'drop', got 'lose'"):
        TokenizerVocabulary(bpe(), unknown="lose")
    with pytest.raises(InputError, match="special_tokens: want 'none' or 'add', got True"):
        TokenizerVocabulary(bpe(), special_tokens=True)
    with pytest.raises(InputError, match="unknown: want 'keep' where special_tokens is 'add'"):
        TokenizerVocabulary(bpe(), unknown="drop", special_tokens="add")
    with pytest.raises(InputError, match="max_length: want at least 1, got 0"):
        TokenizerVocabulary(bpe(), max_length=0)
