"""fastqt config: versions and backends."""

from __future__ import annotations

from typing import Any


def add_parser(commands: Any) -> None:
    """Adds the command's options to the subparsers of `fastqt`."""
    commands.add_parser("config", help="show versions and backends")


def run() -> int:
    """Runs the command. For the arguments see `add_parser`; returns the exit status."""
    from fastqt.engines import show_config

    show_config()
    return 0
