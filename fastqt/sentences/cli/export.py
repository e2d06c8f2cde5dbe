"""fastqt export: a trained model as files that other libraries load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastqt.sentences.cli.command import Command
from fastqt.sentences.options.commands import ExportOptions
from fastqt.sentences.options.option import option


@dataclass(frozen=True, kw_only=True)
class Export(Command, ExportOptions):
    """Writes the encoder of a trained model, its vocabulary and a model card.

    The vectors are those of fastqt embed.
    """

    title: ClassVar[str] = "write a model for sentence-transformers, or as ONNX"

    model: str = option(help="a directory that train wrote", file="MODEL", positional=True)
    out: str = option(help="directory to write", file="DIR")
    push_to_hub: str | None = option(
        None,
        "upload DIR to this repository of the Hugging Face hub, OWNER/NAME, which is made as a private one "
        "if it is not there",
        file="REPO",
    )

    def run(self) -> int:
        from fastqt.sentences.inference.export import export_run
        from fastqt.sentences.inference.export.hub import check_hub, push

        if self.push_to_hub is not None:
            check_hub()
        width = export_run(
            self.model, self.out, self.format, normalize=not self.raw, overwrite=self.overwrite
        )
        print(f"{self.out}: {self.format}, vectors of width {width}")
        if self.push_to_hub is not None:
            print(f"{push(self.out, self.push_to_hub)}: uploaded")
        return 0
