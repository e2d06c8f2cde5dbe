"""Models of sentence-transformers in folders (the extra `st`), as encoders of searches and evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fastqt.errors import InputError, one_line
from fastqt.integrations._libraries import load_library
from fastqt.nn.tokens import list_of_texts
from fastqt.sentences.options.commands import Side
from fastqt.sentences.runs.files import digest_of_folder
from fastqt.sentences.runs.model import choose_device
from fastqt.sentences.text import Prompts

MODULES = "modules.json"  # which such a folder has, and a run has not


def is_library_folder(directory: str | Path) -> bool:
    """Whether a folder has a model of the library that is not one of fastqt's own."""
    path = Path(directory) / MODULES
    return path.is_file() and "fastqt." not in path.read_text(encoding="utf-8", errors="replace")


class LibraryEncoder:
    """A `SentenceTransformer`, with what `SentenceEncoder` has for searches.

    Attributes:
        width: the width D of the vectors.
        prompts: those that the model names "query" and "document", which stand in front of texts.
        identity: a digest of all files of the folder; None if nobody asked for it.
    """

    def __init__(self, directory: str | Path, device: str = "auto", *, with_identity: bool = False) -> None:
        try:
            library = load_library("sentence_transformers")
        except ImportError as error:
            raise InputError(f"{directory} has a model of sentence-transformers: {error}") from error
        where = str(choose_device(device))
        try:
            self.model = library.SentenceTransformer(str(directory), device=where, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise InputError(f"{directory}: {one_line(error, 1000)}") from error
        self.width: int = len(self.model.encode(["a"], show_progress_bar=False)[0])
        named = self.model.prompts or {}
        self.prompts = Prompts(named.get("query") or "", named.get("document") or "")
        self.identity = digest_of_folder(Path(directory)) if with_identity else None

    def encode(
        self, sentences: Sequence[str], *, normalize: bool = True, side: Side = "query"
    ) -> NDArray[np.float32]:
        """As of `SentenceEncoder.encode`: (n, D) float32; a blank text has zeros."""
        prompt = self.prompts.query if side == "query" else self.prompts.document
        return self._encode(sentences, prompt, normalize=normalize)

    def encode_as_they_are(self, sentences: Sequence[str], *, normalize: bool) -> NDArray[np.float32]:
        """The same of texts that have their prompts already."""
        return self._encode(sentences, "", normalize=normalize)

    def _encode(self, sentences: Sequence[str], prompt: str, *, normalize: bool) -> NDArray[np.float32]:
        texts = list_of_texts("sentences", sentences)
        if not texts:
            return np.zeros((0, self.width), np.float32)
        with torch.inference_mode():
            encoded = self.model.encode(
                texts, prompt=prompt, normalize_embeddings=normalize, show_progress_bar=False
            )
        result = np.asarray(encoded, dtype=np.float32)
        result[[not text.strip() for text in texts]] = 0
        return result
