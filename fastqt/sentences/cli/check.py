"""fastqt check: whether the losses are right on the devices of this machine, and how fast they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastqt.sentences.cli.command import Command
from fastqt.sentences.options.option import option

SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Check(Command):
    """Every engine that is usable computes losses and gradients.

    They are compared with the formulas in float64. The exit status is 1 if something is wrong.
    """

    title: ClassVar[str] = "check that the losses are right on this machine's devices, and measure them"

    device: tuple[str, ...] = option(
        (), "cpu, cuda, cuda:1, mps, xpu and so on (default: every one there is)", spaced=True
    )
    quick: bool = option(False, "small sizes, in a few seconds")
    seconds: float = option(SECONDS, "time in all; what it does not reach is told")
    json: str | None = option(None, "file to write: all results", file="FILE.json")

    def run(self) -> int:
        from fastqt.machine import check
        from fastqt.sentences.json_text import to_json
        from fastqt.sentences.runs.files import check_can_be_written, check_ending, write_atomically

        if self.json is not None:
            check_ending(self.json, ".json")
            check_can_be_written(self.json)
        results = check.run(list(self.device), quick=self.quick, seconds=self.seconds)
        if self.json is not None:
            text = to_json(results, indent=1) + "\n"
            write_atomically(self.json, lambda path: path.write_text(text, encoding="utf-8"))
            print(f"{self.json}: all results")
        return 0 if results["right"] else 1
