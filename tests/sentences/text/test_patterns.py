"""Files laid out as those of well-known models, and the regular expressions that files may have."""

import json
import struct

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fastqt.errors import InputError
from fastqt.sentences.text import TokenizerVocabulary
from fastqt.sentences.text.patterns import ends_soon
from tests.shared.tokenizer_files import bpe, unigram, word_piece

TEXTS = ["Topic1word2 place3's  12345\n\n x", "The CATs sat; they'LL go!", "Ünïcödé ☃ \t zzz", "topic"]
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LOWER, UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
SIGN, SHORT = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
CASES = rf"{SIGN}{UPPER}*{LOWER}+SHORT|{SIGN}{UPPER}+{LOWER}*SHORT|"
PATTERNS = {
    "t5": r" {2,}",
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama-3": WORDS + r"\p{N}{1,3}" + REST,
    "qwen-2": WORDS + r"\p{N}" + REST,
    "qwen-3.5": WORDS.replace(r"\p{L}+", r"[\p{L}\p{M}]+") + r"\p{N}" + REST,
    "gpt-4o": CASES.replace("SHORT", SHORT) + r"\p{N}{1,3}" + REST.replace(r"+[\r\n]*", r"+[\r\n/]*"),
    "mistral": CASES.replace("SHORT", "") + r"\p{N}" + REST.replace(r"+[\r\n]*", r"+[\r\n/]*"),
    "bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "deepseek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+",
    "clip": r"<\|startoftext\|>|'s|'t|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "falcon": r"[0-9][0-9][0-9]",
}
ENDLESS = [
    *("(a+)+b", "(a|a)*b", "(a|aa)+b", "(?:a?){9}b", "(.*)*", "(?i:a+)?b", "((a))", r"(a)\1", "(?R)"),
    *("a*a*b", "a+?b+?c", "a*a*a*", "a{2,}b{2,}c", "a{1,3}+b", "a**", "a{10000}", "a?" * 9 + "b", "b" * 3000),
    *("", "a*", "|a", "a|b?", "(?!a)", "(?=a*)b", "(?<=a)b", "[a", "a{1,3"),
]


def split(*patterns):
    """As files of byte-level models have it: the texts' parts by expressions, and then their bytes."""
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(False, use_regex=False)])


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
    return byte_level(split(PATTERNS["llama-3"]), post_processor=both)


MODELS = {
    "bert": word_piece,
    "gpt-2": lambda: byte_level(pre_tokenizers.ByteLevel(False)),
    "gpt-4o": lambda: byte_level(split(PATTERNS["gpt-4o"])),
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
    "qwen": lambda: byte_level(split(PATTERNS["qwen-2"]), normalizers.NFC()),
    "mistral": byte_fallback,
    "modernbert": lambda: byte_level(
        pre_tokenizers.ByteLevel(False),
        normalizers.NFC(),
        processors.TemplateProcessing(single="<pad> $A <pad>", special_tokens=[("<pad>", 263)]),
    ),
}


@pytest.mark.parametrize("special", ["none", "add"])
@pytest.mark.parametrize("name", MODELS)
def test_files_of_well_known_models(tmp_path, name, special):
    made = MODELS[name]()
    made.save(str(tmp_path / "tokenizer.json"))
    made.no_truncation()
    ids, lengths = TokenizerVocabulary.load(
        tmp_path / "tokenizer.json", max_length=99, special_tokens=special
    ).encode(TEXTS)
    wanted = [made.encode(text, add_special_tokens=special == "add").ids for text in TEXTS]
    assert lengths.tolist() == [*map(len, wanted)]
    assert ids.tolist() == [number for row in wanted for number in row]


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_expressions_of_well_known_models_are_taken(tmp_path, pattern):
    byte_level(split(pattern)).save(str(tmp_path / "tokenizer.json"))
    assert len(TokenizerVocabulary.load(tmp_path / "tokenizer.json").encode(TEXTS).ids) > len(TEXTS)


@pytest.mark.parametrize("pattern", ENDLESS, ids=range(len(ENDLESS)))
def test_expressions_that_may_not_end_are_refused(tmp_path, pattern):
    state = json.loads(byte_level(split("a")).to_str())
    state["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match=r"pre_tokenizer\[0\]\.pattern: want a text, or a regular "):
        TokenizerVocabulary.load(tmp_path / "tokenizer.json")


def test_expressions_one_sign_from_being_refused():
    for taken, refused in (("a+b+c?", "a+b+c"), ("(?:ab|cd)?e", "(?:ab|cd)*e"), ("a{1,9}", "a{1,10}")):
        assert (ends_soon(taken), ends_soon(refused)) == (True, False)
