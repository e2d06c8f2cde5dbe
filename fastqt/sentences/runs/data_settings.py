"""What a training reads: the text, its vocabulary, and what it is validated on."""

from __future__ import annotations

from dataclasses import dataclass

from fastqt.sentences.runs.model_settings import WIDEST
from fastqt.sentences.runs.settings import option


@dataclass(frozen=True)
class DataSettings:
    """The text of a training, its vocabulary, and what it is validated on."""

    corpus: tuple[str, ...]
    column: str | None = option(
        None,
        "column of the text in .parquet and .arrow files and folders of the datasets library (default: text, "
        "sentence, or the only one of text)",
    )
    document_column: str | None = option(None, "column of them that has another value in another document")
    documents: str = option(
        "cut", "context windows end at document boundaries, or cross them", choices=("cut", "cross")
    )
    valid: str | None = option(None, "held-out text to validate on")
    dev: str | None = option(
        None, "sentence pairs with gold scores, such as STS-B's dev.tsv: keep the model that ranks them best"
    )
    vocabulary: str | None = option(
        None, "file of the tokenizers library (tokenizer.json) whose tokens take the place of words"
    )
    special_tokens: str = option(
        "none", "special tokens of --vocabulary, such as [CLS], that a sentence gets", choices=("none", "add")
    )
    vocab_size: int = option(
        None,
        "number of words in the vocabulary, including <unk> (default: 50,000; skip-thoughts 20,000)",
        at_least=2,
        below=(1 << 31),
    )
    unknown: str = option(
        "keep", "words outside the vocabulary become <unk>, or are dropped", choices=("keep", "drop")
    )
    max_length: int = option(
        None,
        "longer sentences are cut to this many words (default: 50; skip-thoughts 30; simcse and mixcse 32; "
        "pairs 128)",
        at_least=1,
        below=WIDEST + 1,
    )
