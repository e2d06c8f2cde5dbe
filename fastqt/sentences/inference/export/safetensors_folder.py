"""The weights of a model's encoders under the names that layers of torch.nn have, with what they mean."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from fastqt._version import __version__
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.halves import halves_of
from fastqt.sentences.json_text import to_json
from fastqt.sentences.runs.card import Usage
from fastqt.sentences.runs.checkpoint import MODEL, write_text
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.encoders.forms import form_of
from fastqt.sentences.runs.lexicon import save_lexicon
from fastqt.sentences.runs.tensor_files import save_tensors

DESCRIPTION = "encoder.json"
FORMAT = 1  # version of the format of encoder.json

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
        descriptions = []
        for part, each in form_of(half).parts(name, half):
            form = form_of(each)
            descriptions.append({"name": part, "width": each.embedding_dim, **form.description(each)})
            of_part = form.weights(each, folder / part)
            weights |= {f"{part}.{key}": tensor for key, tensor in of_part.items()}
        halves.append(descriptions)

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
    if config.checkpoint is None:  # whose directory would have the tokenizer
        save_lexicon(encoder.vocabulary, folder)
