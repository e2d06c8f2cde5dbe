"""fastqt config: versions and backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastqt.sentences.cli.command import Command


@dataclass(frozen=True, kw_only=True)
class Config(Command):
    """Shows versions, and which engine computes on each device."""

    title: ClassVar[str] = "show versions and backends"

    def run(self) -> int:
        from fastqt.engines import show_config

        show_config()
        return 0
