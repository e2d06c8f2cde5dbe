"""fastqt compile: the GPU kernels of a training, compiled before its first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastqt.machine.warming import LOSSES, compile_loss
from fastqt.options import Target
from fastqt.sentences.cli.command import Command
from fastqt.sentences.options.option import option

ROWS, WIDTH = 4096, 768


@dataclass(frozen=True, kw_only=True)
class Compile(Command):
    """They are kept in Triton's cache, where trainings on this machine find them.

    With --target that takes no GPU. The scale of clip and siglip, and the latter's bias, are learnt ones.
    """

    title: ClassVar[str] = "compile the GPU kernels of a loss, so that the first step of a training does not"

    loss: str = option(help=", ".join(LOSSES), choices=tuple(LOSSES), file="LOSS", positional=True)
    rows: tuple[int, ...] = option(
        (ROWS,),
        "sizes of batches: the usual one and, if it is another, an epoch's last",
        at_least=1,
        spaced=True,
    )
    columns: int | None = option(None, "candidates, if they are not as many as the rows", at_least=1)
    width: int = option(WIDTH, "of the embeddings", at_least=1)
    dtype: Literal["bfloat16", "float16", "float32"] = option("bfloat16", "of the embeddings")
    target: Target | None = option(None, "compile for this kind of GPU")
    workers: int | None = option(None, "threads (default: one for each processor)", at_least=1)
    option: tuple[str, ...] = option(
        (), "an argument of the loss, as diagonal=keep; may be given several times", repeats=True
    )

    def run(self) -> int:
        compiled = compile_loss(
            self.loss,
            self.rows,
            self.columns,
            self.width,
            self.dtype,
            target=self.target,
            workers=self.workers,
            options=self.option,
        )
        for line in compiled:
            print(line, flush=True)
        return 0
