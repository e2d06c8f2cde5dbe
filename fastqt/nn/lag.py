"""Tables of which an optimiser brings a row up to date only when it is read.

Dense Adam moves every row of a table in every step, by its momentum. `fastqt.optim.Adam(rows="replayed")`
moves the rows of the batch, and another row once it is read, by all steps that it has missed. Modules of
fastqt call `up_to_date` before they read a table: so the forward pass for the rows of its ids, and `eval()`
and `state_dict()` for all rows. A table stays right without its optimiser, which brings all rows up to date
when another one takes the table, and when it is deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Of each table that an optimiser has: the optimiser's method that is told what is read.
Reader = Callable[[Tensor, "Tensor | None"], None]
_READERS: Any = WeakTensorKeyDictionary()


def tell_reads(table: Tensor, reader: Reader) -> None:
    """Lets `reader`, a method, be called before a module reads rows of the table; the last one counts.

    The one before is called once more, for all rows.
    """
    before = _READERS.get(table)
    if before is not None and before() != reader:
        up_to_date(table)
    _READERS[table] = WeakMethod(reader)


def up_to_date(table: Tensor, ids: Tensor | None = None) -> None:
    """Brings the rows of these ids up to date before they are read, or all of them."""
    reference = _READERS.get(table)
    reader = None if reference is None else reference()
    if reader is not None:
        reader(table, ids)


up_to_date._torchdynamo_disable = True  # type: ignore[attr-defined]  # Dynamo's mark: do not trace
