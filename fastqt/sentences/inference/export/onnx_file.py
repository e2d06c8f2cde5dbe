"""A model as model.onnx, from token ids to vectors, which onnxruntime has computed before it is kept."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.errors import InputError, one_line
from fastqt.nn import Encoder
from fastqt.nn.modes import evaluating
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.export.folder import check_vectors
from fastqt.sentences.inference.halves import halves_of, tokens_of
from fastqt.sentences.runs.card import Usage
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.encoders import form_of
from fastqt.sentences.runs.lexicon import save_lexicon
from fastqt.sentences.runs.model import prompts_of

FILE = "model.onnx"
INPUTS, OUTPUT = ("input_ids", "attention_mask"), "sentence_embedding"
LIBRARIES = ("onnx", "onnxscript", "onnxruntime")
ONE_FILE = 1 << 30  # bytes of weights up to which they lie in model.onnx itself, whose format ends at 2 GiB
OPSET = 20

USAGE = """\
`model.onnx` has two inputs of int64, both (batch, length): `input_ids`, the ids of a text's words or tokens
and then any padding, and `attention_mask`, 1 for words and 0 for padding. Its output `sentence_embedding` is
(batch, width) in float32. A blank text, whose mask is 0 everywhere, has a vector of zeros.{notes}

```python
import numpy as np
import onnxruntime
{tokenize}
session = onnxruntime.InferenceSession("model.onnx")
inputs = {{"input_ids": np.array(ids), "attention_mask": np.array(mask)}}
(vectors,) = session.run(None, inputs)
```
"""
OF_WORDS = """\
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("vocabulary.json")
tokenizer.enable_padding()
encodings = tokenizer.encode_batch(["a sentence", "another one"], add_special_tokens=False)
ids, mask = [each.ids for each in encodings], [each.attention_mask for each in encodings]
"""
OF_CHECKPOINT = """\
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("huggingface")
texts = ["a sentence", "another one"]
encodings = tokenizer(texts, padding=True, padding_side="right", truncation=True, max_length={length})
ids, mask = encodings["input_ids"], encodings["attention_mask"]
"""


def onnx_usage(config: TrainConfig) -> Usage:
    """How the exported file of a run with these settings is used, for its card."""
    notes, tokenize = "", OF_WORDS
    if config.checkpoint is not None:
        tokenize = OF_CHECKPOINT.format(length=config.max_length)
    elif config.unknown == "drop":
        notes = (
            "\nThe training left unknown words out: take their id away, unless a text has no other word, and "
            f"cut a text\nto {config.max_length} ids after that."
        )
    if any(prompts := prompts_of(config)):
        notes += (
            f"\nThe training put {prompts.query!r} in front of queries and {prompts.document!r} in front of "
            "documents."
        )
    return Usage("onnx", USAGE.format(notes=notes, tokenize=tokenize))


def write_onnx(folder: Path, encoder: SentenceEncoder, *, normalize: bool) -> None:
    """Writes model.onnx and the vocabulary to a directory."""
    for name in LIBRARIES:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            raise InputError(f"format onnx needs {error.name}: pip install 'fastqt[onnx]'") from error

    graph = Graph(list(halves_of(encoder.model).values()), normalize=normalize)
    path = folder / FILE
    size = sum(tensor.nbytes for tensor in graph.state_dict().values())
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    # The sizes of these examples are not kept: neither of them may be 1, which torch takes for a constant.
    tokens = torch.zeros(2, 3, dtype=torch.int64, device="cpu")
    example = tokens, torch.ones_like(tokens)

    with _in_silence(), evaluating(graph), torch.inference_mode(False), torch.no_grad():
        try:
            torch.onnx.export(
                graph,
                example,
                str(path),
                input_names=list(INPUTS),
                output_names=[OUTPUT],
                dynamic_shapes=(axes, axes),
                opset_version=OPSET,
                dynamo=True,
                external_data=size > ONE_FILE,
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            raise InputError(
                f"format: torch cannot export this encoder to onnx: {one_line(error.__cause__ or error)}"
            ) from error

    session = import_module("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def encode(texts: Sequence[str]) -> NDArray[Any]:
        tokens, lengths = tokens_of(encoder.vocabulary, texts, encoder.prompts.query)
        mask = np.arange(tokens.shape[1]) < lengths.numpy()[:, None]
        feeds = dict(zip(INPUTS, (tokens.numpy(), mask.astype(np.int64)), strict=True))
        vectors: NDArray[Any] = session.run([OUTPUT], feeds)[0]
        return vectors

    check_vectors(encoder, encode, normalize=normalize, format="onnx")
    save_lexicon(encoder.vocabulary, folder)


@contextlib.contextmanager
def _in_silence() -> Iterator[None]:
    """Keeps torch's exporter from warnings and listings, none of which a user can do anything about."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


class Graph(nn.Module):
    """The vectors of a model with these encoders, of padded token ids, without lengths on the host.

    Encoders compute with the words of a batch alone, which ONNX cannot express; the graphs of their forms
    compute the same from the padded batch. Padding may be any ids: it is replaced by 0 before tables are
    read. `normalize` scales each encoder's vectors to norm 1.
    """

    def __init__(self, halves: Sequence[Encoder], *, normalize: bool) -> None:
        super().__init__()
        self.halves = nn.ModuleList(form_of(half).graph(half) for half in halves)
        self.normalize = normalize

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, E) of token ids (B, L) and a mask (B, L), both int64: 1 at words, which come first, and 0."""
        valid = attention_mask > 0
        tokens = torch.where(valid, input_ids, 0)
        vectors = [half(tokens, valid) for half in self.halves]
        return torch.cat([F.normalize(half, dim=1) if self.normalize else half for half in vectors], dim=1)
