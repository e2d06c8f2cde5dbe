"""Losses over several processes, on the collectives of torch.distributed.

The batch is the concatenation of what the ranks of a group give, in the order of the ranks. Every loss takes
`group=`; `Group` says how the ranks hold the batch and what their gradients are for.
"""

from fastqt.distributed.group import Group

__all__ = ["Group"]
