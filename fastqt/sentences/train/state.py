"""What the ranks of a training take over from rank 0 before the first step, and what they do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from fastqt.sentences.runs.checkpoint import read_generators, set_generator_states
from fastqt.sentences.train.ranks import Ranks


def follow_first(ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives the model and the optimiser of each rank the state of those of rank 0, in place.

    The optimiser of another rank than 0 must have no state yet.
    """
    ranks.equalize(model.state_dict().values())
    parameters = dict(model.named_parameters())
    kept = ranks.first(
        lambda: [
            (name, key, value.shape, value.dtype, value.device.type)
            for name, parameter in parameters.items()
            for key, value in optimizer.state[parameter].items()
        ]
    )
    for name, key, shape, dtype, device in kept:
        state = optimizer.state[parameters[name]]
        if key not in state:
            state[key] = torch.empty(shape, dtype=dtype, device=device)
        ranks.equalize([state[key]])


def part_generators(ranks: Ranks, seed: int, step: int, checkpoint: Path | None) -> None:
    """Gives torch's random number generators of each rank a state of its own, by seed and number of steps.

    Otherwise dropout would be the same on all ranks. Rank 0 keeps what it has, as one process does. A rank
    gets its generators back from the checkpoint of rank 0, if they are in it.
    """
    stored = ranks.first(lambda: [] if checkpoint is None else read_generators(checkpoint))
    if not ranks.rank:
        return
    sequence = np.random.SeedSequence([seed, ranks.rank, step])
    torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))
    if checkpoint is not None and ranks.rank < len(stored):
        set_generator_states(stored[ranks.rank], checkpoint)
