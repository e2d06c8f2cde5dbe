"""Exports a trained model to files that other libraries load."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from numpy.typing import NDArray
from tokenizers import Tokenizer

from fastqt._version import __version__
from fastqt.errors import InputError
from fastqt.integrations._libraries import load_library
from fastqt.nn import BagOfWords, Encoder
from fastqt.sentences.errors import only_a_report
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.export.folder import check_folder, check_vectors, new_folder
from fastqt.sentences.inference.export.onnx_file import onnx_usage, write_onnx
from fastqt.sentences.inference.halves import halves_of
from fastqt.sentences.runs.card import Usage, card_text, progress_of
from fastqt.sentences.runs.checkpoint import CARD, write_text
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.text import Vocabulary

if TYPE_CHECKING:
    from fastqt.integrations.huggingface import HuggingFaceEncoder

LIBRARY = "sentence-transformers"
# How the library pools the states of tokens. The pooler of "cls" is a part of the checkpoint's own model.
POOLINGS = {"mean": "mean", "cls_before_pooler": "cls"}

USAGE = """\
```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("."{trust})  # the directory of this page
vectors = model.encode(["a sentence", "another one"])
```
"""
TRUST = """
`trust_remote_code=True` lets the library import fastqt, which must be installed. The directory holds no code.
"""
FORMATS = (LIBRARY, "onnx")


def export_run(
    run: str | Path, out: str | Path, format: str, *, normalize: bool = True, overwrite: bool = False
) -> int:
    """Writes the encoder of a run as a directory in one of `FORMATS`; returns the width of its vectors.

    The vectors are those that `fastqt embed` writes, with `normalize` as there. What was written is loaded
    and compared with them before it takes its place. `out` is a new directory, or with `overwrite` one that
    an earlier call wrote. It gets a model card, README.md, too.
    """
    run, out = Path(run), Path(out)
    if format not in FORMATS:
        raise InputError(f"format: want one of {', '.join(FORMATS)}, got {format!r}")
    if format == "onnx" and str(out).encode(errors="replace").decode() != str(out):
        raise InputError(f"out: want a path in UTF-8, as onnxruntime opens it, got {str(out)!r}")
    check_folder(out, overwrite=overwrite)

    encoder = SentenceEncoder.load(run, "cpu", with_identity=True)
    config = encoder.config
    halves = len(halves_of(encoder.model))
    about: dict[str, object] = {
        "format": format,
        "fastqt": __version__,
        "normalize": normalize,
        "prompts": encoder.prompts._asdict(),
        "identity": encoder.identity,
    }
    progress = None
    with only_a_report("what the model was trained on"):
        progress = progress_of(run)
    with new_folder(out, about) as folder:
        if format == LIBRARY:
            write_library_folder(folder, encoder, normalize=normalize)
            usage = library_usage(config, halves)
        else:
            write_onnx(folder, encoder, normalize=normalize)
            usage = onnx_usage(config)
        write_text(folder / CARD, card_text(run, config, encoder.model, progress, usage, encoder.identity))
    return encoder.model.embedding_dim


def write_library_folder(folder: Path, encoder: SentenceEncoder, *, normalize: bool) -> None:
    """Writes a model of a run to a directory, as the library saves it."""
    try:
        library = load_library("sentence_transformers")
    except ImportError as error:
        raise InputError(f"format {LIBRARY}: {error}") from error

    halves = list(halves_of(encoder.model).values())
    if is_plain(encoder.config, len(halves)):
        modules = _library_modules(encoder, halves[0], normalize)
    else:
        from fastqt.sentences.inference.sentence_transformers import FastqtEncoder

        modules = [FastqtEncoder(encoder, normalize)]
    model = library.SentenceTransformer(
        modules=modules,
        device="cpu",
        prompts=encoder.prompts._asdict(),
        default_prompt_name="query" if encoder.prompts.query else None,  # that of `fastqt embed`
        similarity_fn_name="cosine",
    )
    model.save_pretrained(str(folder), create_model_card=False)

    # The class of fastqt is code that the library has to trust. No checkpoint may bring code of its own.
    trust = not is_plain(encoder.config, len(halves))
    loaded = library.SentenceTransformer(
        str(folder), device="cpu", trust_remote_code=trust, local_files_only=True
    )

    def encode(texts: Sequence[str]) -> NDArray[Any]:
        vectors: NDArray[Any] = loaded.encode(list(texts), show_progress_bar=False)
        return vectors

    check_vectors(encoder, encode, normalize=normalize, format=LIBRARY)


def is_plain(config: TrainConfig, halves: int) -> bool:
    """Whether the library's own modules compute the vectors, for which no fastqt is needed.

    They leave no unknown token out, which a checkpoint never does.
    """
    keeps_all = config.unknown == "keep" or config.checkpoint is not None
    return config.encoder_kind.is_library_s and halves == 1 and keeps_all


def library_usage(config: TrainConfig, halves: int) -> Usage:
    """How the exported directory of a run with these settings is loaded, for its card."""
    if is_plain(config, halves):
        return Usage(LIBRARY, USAGE.format(trust=""))
    return Usage(LIBRARY, USAGE.format(trust=", trust_remote_code=True") + TRUST)


def _library_modules(encoder: SentenceEncoder, half: Encoder, normalize: bool) -> list[Any]:
    """The library's modules of an encoder, and the scaling to norm 1."""
    from sentence_transformers.base.modules import Normalize

    if isinstance(half, BagOfWords):
        modules = [_static_module(half, cast("Vocabulary", encoder.vocabulary))]
    else:
        modules = _checkpoint_modules(cast("HuggingFaceEncoder", half))
    return [*modules, Normalize()] if normalize else modules


def _static_module(encoder: BagOfWords, vocabulary: Vocabulary) -> Any:
    """The library's StaticEmbedding, with a tokenizer that cuts texts where the training cut them."""
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    return StaticEmbedding(Tokenizer.from_str(vocabulary.to_json()), encoder.embedding.weight.detach())


def _checkpoint_modules(encoder: HuggingFaceEncoder) -> list[Any]:
    """The library's modules of a checkpoint: its transformer, and a pooling."""
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    output = "pooler_output" if encoder.pooling == "cls" else "last_hidden_state"
    with tempfile.TemporaryDirectory(prefix="fastqt-") as folder:
        encoder.save(folder)
        transformer = Transformer(
            folder,
            max_seq_length=encoder.max_length,
            modality_config={"text": {"method": "forward", "method_output_name": output}},
            module_output_name="sentence_embedding" if encoder.pooling == "cls" else "token_embeddings",
        )
    modules: list[Any] = [transformer]
    if encoder.pooling != "cls":
        modules.append(Pooling(encoder.embedding_dim, pooling_mode=cast("Any", POOLINGS[encoder.pooling])))
    return modules
