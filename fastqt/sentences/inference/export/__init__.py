"""Exports a trained model to files that other libraries load."""

from __future__ import annotations

from pathlib import Path

from fastqt._version import __version__
from fastqt.errors import InputError
from fastqt.sentences.errors import only_a_report
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.export.folder import check_folder, new_folder
from fastqt.sentences.inference.export.library_folder import LIBRARY, library_usage, write_library_folder
from fastqt.sentences.inference.export.onnx_file import onnx_usage, write_onnx
from fastqt.sentences.inference.halves import halves_of
from fastqt.sentences.runs.card import card_text, progress_of
from fastqt.sentences.runs.checkpoint import CARD, write_text

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
