"""A rank of an example's run, which writes what it has at the end to a file.

torchrun --nproc-per-node 2 tests/shared/run_example.py EXAMPLE DIRECTORY [OPTION ...]
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

EXAMPLES = Path(__file__).parents[2] / "examples"


def digest(model: torch.nn.Module) -> str:
    """Of the bits of all parameters, those of sharded ones gathered."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found.update(whole.detach().cpu().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    example, directory, *arguments = sys.argv[1:]
    sys.path.insert(0, str(EXAMPLES))
    model, losses = importlib.import_module(example).main(arguments)
    rank = dist.get_rank()
    answer = {"losses": losses, "parameters": digest(model)}
    Path(directory, f"{rank}.json").write_text(json.dumps(answer))
    dist.destroy_process_group()
    # DDP and FSDP keep the group, which ends with the process. A thread of Gloo that still has tensors of the
    # last exchange needs Python to free them, and aborts where Python is ending. So Python does not end here.
    sys.stdout.flush()
    os._exit(0)
