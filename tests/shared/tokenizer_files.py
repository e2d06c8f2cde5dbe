"""Small tokenizers of each model of the `tokenizers` library, made by hand."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def bpe() -> Tokenizer:
    """Byte-level, without an unknown token, with padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "o"), ("to", "p"), ("i", "c"), ("top", "ic"), ("Ġ", "topic"), ("w", "o"), ("wo", "r")]
    tokens = [*alphabet, *("".join(pair) for pair in merges), "<pad>"]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.enable_padding(pad_id=len(tokens) - 1, pad_token="<pad>")
    return made


def word_piece() -> Tokenizer:
    """As BERT's, with special tokens by its post-processor and a truncation of its own."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "topic", "place", "word", ".", "a", "cat", "sat", "##s"]
    words += [*LETTERS, *(f"##{letter}" for letter in LETTERS if letter != "s"), "##word"]
    ids = {word: i for i, word in enumerate(dict.fromkeys(words))}
    made = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    made.enable_truncation(2)
    return made


def unigram() -> Tokenizer:
    """As T5's, with the pattern of its normalizer."""
    pieces = [("<unk>", 0.0), ("▁topic", -1.0), ("▁place", -1.5), ("word", -2.0), ("▁", -3.0)]
    pieces += [(letter, -4.0 - i / 10) for i, letter in enumerate(LETTERS[:30])]
    made = Tokenizer(models.Unigram(pieces, unk_id=0))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), "▁")])
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace()])
    return made


TOKENIZERS = {"bpe": bpe, "word_piece": word_piece, "unigram": unigram}
