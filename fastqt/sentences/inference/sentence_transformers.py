"""Models of fastqt as modules of the `sentence_transformers` library (the extra `st`).

The modules.json of exported directories names this class by its path, so it stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastqt.errors import InputError
from fastqt.integrations._libraries import load_library
from fastqt.nn.tokens import list_of_texts
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.halves import halves_of, tokens_of, vectors_of
from fastqt.sentences.json_text import field, read_object
from fastqt.sentences.runs.checkpoint import CONFIG, MODEL, save_model, write_text
from fastqt.sentences.runs.config import LARGEST_FILE
from fastqt.sentences.runs.lexicon import save_lexicon
from fastqt.sentences.text import Vocabulary

load_library("sentence_transformers")
from sentence_transformers.base.modules.input_module import InputModule  # noqa: E402  # after the check


class FastqtEncoder(InputModule):
    """A model that `fastqt train` wrote, as the only module of a `SentenceTransformer`.

    Its vectors are those of `fastqt embed`: each half of a vector has norm 1, and a blank text has a vector
    of zeros. It can be trained further.

    Args:
        encoder: the model, its vocabulary, and the settings that it was trained with.
        normalize: scale vectors, or each of their halves, to norm 1.

    Raises:
        InputError: a GLOSS model, which has no encoder.
    """

    config_file_name = "fastqt_encoder.json"
    config_keys = ["normalize"]  # noqa: RUF012  # the library's own attribute

    def __init__(self, encoder: SentenceEncoder, normalize: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.config, self.normalize = encoder.config, normalize
        self.model, self.vocabulary = encoder.model, encoder.vocabulary
        self.tokenizer = cast("Vocabulary", encoder.vocabulary).tokenizer  # which the other kinds have too
        self.halves = list(halves_of(encoder.model).values())  # of `model`, which has the parameters
        for module in self.model.modules():
            if isinstance(module, nn.Embedding):
                module.sparse = False  # the library's optimisers take no sparse gradients

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any
    ) -> dict[str, Tensor | Any]:
        """Token ids (B, L) of B texts, and which of them are no padding; none is of a blank text."""
        inputs = list_of_texts("inputs", inputs)
        tokens, lengths = tokens_of(self.vocabulary, inputs, prompt or "")
        valid = torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)
        return {"input_ids": tokens, "attention_mask": valid.long()}

    def forward(self, features: dict[str, Tensor | Any], **kwargs: Any) -> dict[str, Tensor | Any]:
        """Adds the vectors (B, E) of a batch that `preprocess` made, as "sentence_embedding"."""
        lengths = features["attention_mask"].sum(1)
        features["sentence_embedding"] = vectors_of(
            self.halves, features["input_ids"], lengths, normalize=self.normalize
        )
        return features

    @property
    def max_seq_length(self) -> int:
        """The number of words or tokens of a text that are kept."""
        length: int = self.config.max_length
        return length

    def get_embedding_dimension(self) -> int:
        """E, the width of a vector."""
        return self.model.embedding_dim

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Writes the module to an existing directory, which `fastqt embed` reads too."""
        directory = Path(output_path)
        write_text(directory / CONFIG, self.config.to_json())
        save_lexicon(self.vocabulary, directory)
        save_model(directory / MODEL, self.model)
        self.save_config(output_path)

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        init_defaults: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> FastqtEncoder:
        """Reads what `save` wrote; the arguments are those of the library's modules."""
        directory = cls.load_dir_path(
            model_name_or_path, subfolder, token, cache_folder, revision, local_files_only
        )
        if directory is None:
            raise InputError(f"no trained model: {model_name_or_path} has no directory {subfolder!r}")
        return cls.of_run(directory, normalize=_normalizes(Path(directory, cls.config_file_name)))

    @classmethod
    def of_run(cls, directory: str | Path, *, normalize: bool = True) -> FastqtEncoder:
        """Reads a directory that `fastqt train` wrote."""
        return cls(SentenceEncoder.load(directory, "cpu"), normalize)


def _normalizes(path: Path) -> bool:
    try:
        values = read_object(path, most_bytes=LARGEST_FILE)
    except FileNotFoundError:
        raise InputError(f"no exported model: {path} is missing") from None
    normalize: bool = field(values, "normalize", bool, path)
    return normalize
