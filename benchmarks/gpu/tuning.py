"""`benchmarks.tune` as a section: the sections after it are measured with the tiles that it finds."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu import tune
from benchmarks.gpu.sections import Options, Record
from benchmarks.measure.machine import slug


def tuned(options: Options, minutes: float) -> Iterator[Record]:
    """Tunes bfloat16, and yields the table, so that it can be stored with the code."""
    import torch

    arguments = ["--minutes", str(minutes)]
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        if options.dry_run:
            arguments += ["--dry-run", "--dtype", "float32", "--out", folder]
            place = Path(folder) / "interpreter.json"
        else:
            arguments += ["--dtype", "bfloat16"]
            place = tune.TUNED / f"{slug(torch.cuda.get_device_name())}.json"
        with contextlib.redirect_stdout(said):
            status = tune.main(arguments)
        table = json.loads(place.read_text()) if place.exists() else None
    yield {"kind": "tuning", "exit_status": status, "table": table, "output": said.getvalue().splitlines()}
    if status != 0:
        raise RuntimeError(f"tune: want exit status 0, got {status}: {said.getvalue()[-500:]}")
