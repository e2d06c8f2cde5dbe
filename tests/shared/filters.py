"""Each kind of filter by ids with its rule, which all oracles read: a new kind is one more line here."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import fastqt
from fastqt.exclusions import OfIds

# Which cells leave, from the ids of queries (n, 1) and those of columns (m,), of numpy or of torch.
OF_IDS: dict[type[OfIds], Callable[[Any, Any], Any]] = {
    fastqt.Same: operator.eq,
    fastqt.Within: operator.ne,
}
BY_NAME = {kind.__name__.lower(): kind for kind in OF_IDS}
