"""The weights of a model's encoders under the names that layers of torch.nn have, with what they mean."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from fastqt._version import __version__
from fastqt.errors import InputError
from fastqt.nn import BagOfWords, Combine, Encoder, GRUEncoder, LSTMEncoder, Transformer
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.halves import halves_of
from fastqt.sentences.json_text import to_json
from fastqt.sentences.runs.card import Usage
from fastqt.sentences.runs.checkpoint import MODEL, write_text
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.lexicon import HUGGINGFACE, save_lexicon
from fastqt.sentences.runs.tensor_files import save_tensors

if TYPE_CHECKING:
    from fastqt.integrations.huggingface import HuggingFaceEncoder

DESCRIPTION = "encoder.json"
FORMAT = 1  # version of the format of encoder.json

# Parts of the names of the Transformer's weights, and what nn.TransformerEncoder calls them.
OF_TRANSFORMER = (
    (r"^norm\.", "encoder.norm."),
    (r"^layers\.", "encoder.layers."),
    (r"attention_norm\.", "norm1."),
    (r"feedforward_norm\.", "norm2."),
    (r"query_key_value\.", "self_attn.in_proj_"),
    (r"\.output\.", ".self_attn.out_proj."),
    (r"expand\.", "linear1."),
    (r"contract\.", "linear2."),
)

USAGE = Usage(
    "safetensors",
    """\
`model.safetensors` has the weights of the encoders under the names of torch.nn's layers, and `encoder.json`
says what each encoder computes, and what stands in front of texts. The page docs/how-to/export.md of fastqt
explains both.

```python
import json

from safetensors.torch import load_file

weights = load_file("model.safetensors")
encoders = json.load(open("encoder.json"))["halves"]
```
""",
)


def write_safetensors(
    folder: Path, encoder: SentenceEncoder, config: TrainConfig, *, normalize: bool
) -> None:
    """Writes encoder.json, the vocabulary and the weights to a directory.

    The weights are in model.safetensors, except for those of a Hugging Face checkpoint: each has a directory
    of its own, as `transformers` writes it.
    """
    weights: dict[str, Tensor] = {}
    halves = []
    for name, half in halves_of(encoder.model).items():
        parts = list(_parts(name, half))
        halves.append([_described(part, each) for part, each in parts])
        for part, each in parts:
            if hasattr(each, "pooled"):
                cast("HuggingFaceEncoder", each).save(folder / part)
            else:
                weights |= {f"{part}.{key}": tensor for key, tensor in _named(each).items()}

    about = {
        "format": FORMAT,
        "fastqt": __version__,
        "normalize": normalize,
        "halves": halves,
        "max_length": config.max_length,
        "unknown": config.unknown,
        "special_tokens": config.special_tokens,
        "prompts": encoder.prompts._asdict(),
    }
    write_text(folder / DESCRIPTION, to_json(about, indent=2) + "\n")
    if weights:
        save_tensors(folder / MODEL, weights)
    if config.encoder != HUGGINGFACE:  # whose tokenizer is in the checkpoint's directory
        save_lexicon(encoder.vocabulary, folder)


def _parts(name: str, encoder: Encoder) -> Iterator[tuple[str, Encoder]]:
    """The encoders whose vectors stand beside each other in a half, by their names."""
    if not isinstance(encoder, Combine):
        yield name, encoder
        return
    for number, each in enumerate(encoder.encoders):
        yield from _parts(f"{name}.encoders.{number}", cast("Encoder", each))


def _described(name: str, encoder: Encoder) -> dict[str, Any]:
    """What an encoder computes, and where its weights are."""
    about: dict[str, Any] = {"name": name, "width": encoder.embedding_dim}
    if isinstance(encoder, BagOfWords):
        return about | {"kind": "sum of word vectors"}
    if isinstance(encoder, GRUEncoder):
        layer = encoder.recurrent
        cell = "reset-after" if layer.reset_after else "reset-before"
        return about | {"kind": "GRU", "cell": cell, "bidirectional": layer.bidirectional}
    if isinstance(encoder, LSTMEncoder):
        return about | {"kind": "LSTM", "bidirectional": encoder.recurrent.bidirectional}
    if isinstance(encoder, Transformer):
        first: Any = encoder.layers[0]
        sizes = {"layers": len(encoder.layers), "heads": first.heads}
        return about | {"kind": "Transformer", **sizes, "feedforward": first.expand.out_features}
    if hasattr(encoder, "pooled"):
        pooling = cast("HuggingFaceEncoder", encoder).pooling
        return about | {"kind": "checkpoint", "pooling": pooling}
    raise InputError(f"format: want one that a {type(encoder).__name__} can be exported to, got safetensors")


def _named(encoder: Encoder) -> dict[str, Tensor]:
    """The weights of an encoder under torch.nn's names.

    Frozen word vectors that two encoders share are in the file once for each of them.
    """
    weights = dict(encoder.state_dict())
    table: Tensor = encoder.embedding.weight  # type: ignore[union-attr,assignment]  # all kinds here have one
    weights["embedding.weight"] = table.detach().clone()
    if not isinstance(encoder, Transformer):
        return weights
    renamed = {}
    for name, tensor in weights.items():
        for old, new in OF_TRANSFORMER:
            name = re.sub(old, new, name)
        renamed[name] = tensor
    return renamed
