"""A rank of an example's run, which writes what it has at the end to a file.

torchrun --nproc-per-node 2 tests/shared/run_example.py EXAMPLE DIRECTORY [OPTION ...]
"""

from __future__ import annotations

import hashlib
import importlib
import json
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
    # A group that a model holds would end with it, after Python, when its threads cannot be joined any more.
    del model
    dist.destroy_process_group()
