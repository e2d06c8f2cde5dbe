"""Tokenizer files against the library itself, those of well-known models, and what must be refused."""

import functools
import json
import pickle
import struct

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fastqt.errors import InputError
from fastqt.sentences.text import Vocabulary
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


def by_the_library(tokenizer: Tokenizer):
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]


@each_tokenizer
def test_ids_are_those_of_the_library(write, name):
    made = TOKENIZERS[name]()
    vocabulary = Vocabulary.load(write(made), max_length=20)
    # "" has no token; without an unknown token, the padding token takes its place.
    wanted = [ids[:20] or [vocabulary.filler] for ids in by_the_library(made)]
    assert rows(vocabulary.encode(TEXTS)) == wanted
    assert vocabulary.filler == {"bpe": 263, "word_piece": 1, "unigram": 0}[name]
    assert len(vocabulary) == made.get_vocab_size()
    again = pickle.loads(pickle.dumps(vocabulary))
    assert rows(again.encode(TEXTS)) == wanted


@each_tokenizer
@pytest.mark.parametrize("options", [{}, {"unknown": "drop"}], ids=str)
def test_what_is_saved_is_the_same_vocabulary(write, tmp_path, name, options):
    vocabulary = Vocabulary.load(write(TOKENIZERS[name]()), max_length=9, **options)
    vocabulary.save(tmp_path / "saved.json")
    again = Vocabulary.load(tmp_path / "saved.json", max_length=9, **options)
    assert rows(again.encode(TEXTS)) == rows(vocabulary.encode(TEXTS))
    assert again.to_json() == vocabulary.to_json()
    assert (again.filler, len(again)) == (vocabulary.filler, len(vocabulary))


@pytest.mark.parametrize(("name", "ids"), [("bpe", [263]), ("word_piece", [0, 1, 2, 3]), ("unigram", [0])])
def test_special_ids_are_of_tokens_that_no_text_has(write, name, ids):
    assert Vocabulary.load(write(TOKENIZERS[name]()), max_length=9).special_ids() == ids


def test_unknown_tokens_are_dropped_before_sentences_are_cut(write):
    vocabulary = Vocabulary.load(write(word_piece()), unknown="drop", max_length=2)
    assert rows(vocabulary.encode(["☃ ☃ a ☃ cat a", "☃"])) == [[8, 9], [1]]


def test_ids_need_not_be_without_gaps(write):
    state = json.loads(word_piece().to_str())
    state["model"]["vocab"]["late"] = 1000
    vocabulary = Vocabulary.load(write(state), max_length=9)
    assert len(vocabulary) == 1001
    assert rows(vocabulary.encode(["late"])) == [[1000]]


def test_a_vocabulary_of_words_is_a_tokenizer_file(tmp_path):
    words = Vocabulary.build(TEXTS, 9)
    words.save(tmp_path / "vocabulary.json")
    found = Vocabulary.load(tmp_path / "vocabulary.json")
    assert rows(found.encode(TEXTS)) == rows(words.encode(TEXTS))


@pytest.mark.parametrize(
    ("make", "path", "value", "message"),
    [
        (bpe, "model.type", "Words", "did not match any variant"),
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
        (bpe, "normalizer", {"type": "Magic"}, "normalizer|Normalizer"),
        (bpe, "normalizer", [3], "normalizer|Normalizer"),
        (bpe, "truncation", None, "truncation: want an object, got None"),
        (bpe, "truncation.max_length", "3", "max_length: want an integer, got '3'"),
        (bpe, "truncation.max_length", 0, r"truncation\.max_length: want 1 to \d+, got 0"),
        (bpe, "truncation.max_length", 10**12, r"max_length: want 1 to \d+, got 1000000000000"),
    ],
    ids=range(18),
)
def test_broken_files_are_refused_by_field(write, make, path, value, message):
    made = make()
    made.enable_truncation(50)
    state = json.loads(made.to_str())
    *above, last = path.split(".")
    functools.reduce(dict.__getitem__, above, state)[last] = value
    file = write(state)
    with pytest.raises(InputError, match=message) as caught:
        Vocabulary.load(file)
    assert str(caught.value).startswith(f"{file} is no usable tokenizer file: ")
    assert "\n" not in str(caught.value)


def test_files_that_are_no_json_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(InputError, match=r"no vocabulary: .*tokenizer\.json is missing"):
        Vocabulary.load(path)
    for text in ("", "{", "[]", "[" * 100_000, '{"a": 1, "a": 2}'):
        path.write_text(text)
        with pytest.raises(InputError, match=r"tokenizer\.json is damaged"):
            Vocabulary.load(path)
    monkeypatch.setattr("fastqt.sentences.text.vocabulary.LARGEST_FILE", 10)
    path.write_text(bpe().to_str())
    with pytest.raises(InputError, match=r"tokenizer\.json: want at most 10 bytes, got"):
        Vocabulary.load(path)


LONG_TEXTS = ["Topic1word2 place3's  12345\n\n x", "The CATs sat; they'LL go!", "Ünïcödé ☃ \t zzz", "topic"]
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern):
    """As files of byte-level models have it: the texts' parts by an expression, and then their bytes."""
    part = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([part, pre_tokenizers.ByteLevel(False, use_regex=False)])


def byte_level(pre_tokenizer, normalizer=None, post_processor=None):
    made = bpe()
    made.no_padding()
    made.pre_tokenizer, made.decoder = pre_tokenizer, decoders.ByteLevel()
    made.post_processor = post_processor or processors.ByteLevel(trim_offsets=False)
    if normalizer:
        made.normalizer = normalizer
    made.add_special_tokens([AddedToken("<|endoftext|>", normalized=False)])
    return made


def sentence_piece(normalizer, pre_tokenizer):
    made = unigram()
    charsmap = struct.pack("<I", 1024) + bytes(1024)  # which changes nothing
    precompiled = normalizers.Precompiled(charsmap)
    made.normalizer = normalizers.Sequence([precompiled, normalizer])
    made.pre_tokenizer, made.decoder = pre_tokenizer, decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(single="$A <unk>", special_tokens=[("<unk>", 0)])
    return made


def byte_fallback():
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁t", "to"]
    ids = {token: number for number, token in enumerate(tokens)}
    model = models.BPE(ids, [("▁", "t"), ("t", "o")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def llama():
    begin = processors.TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 263)])
    both = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return byte_level(split(LLAMA), post_processor=both)


MODELS = {
    "bert": word_piece,
    "gpt-2": lambda: byte_level(pre_tokenizers.ByteLevel(False)),
    "llama-3": llama,
    "roberta": lambda: byte_level(
        pre_tokenizers.ByteLevel(False),
        post_processor=processors.RobertaProcessing(("<pad>", 263), ("<pad>", 263), add_prefix_space=False),
    ),
    "xlm-r": lambda: sentence_piece(
        normalizers.Replace(Regex(" {2,}"), " "),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    ),
    "t5": lambda: sentence_piece(
        normalizers.Sequence([normalizers.Strip(left=False), normalizers.Replace(Regex(" {2,}"), "▁")]),
        pre_tokenizers.Metaspace(),
    ),
    "qwen": lambda: byte_level(split(LLAMA.replace("{1,3}", "")), normalizers.NFC()),
    "mistral": byte_fallback,
    "modernbert": lambda: byte_level(
        pre_tokenizers.ByteLevel(False),
        normalizers.NFC(),
        processors.TemplateProcessing(single="<pad> $A <pad>", special_tokens=[("<pad>", 263)]),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_files_of_well_known_models(tmp_path, name):
    made = MODELS[name]()
    made.save(str(tmp_path / "tokenizer.json"))
    made.no_truncation()
    ids, lengths = Vocabulary.load(tmp_path / "tokenizer.json", max_length=99).encode(LONG_TEXTS)
    wanted = [made.encode(text, add_special_tokens=False).ids for text in LONG_TEXTS]
    assert lengths.tolist() == [*map(len, wanted)]
    assert ids.tolist() == [number for row in wanted for number in row]
