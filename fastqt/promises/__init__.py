"""A loss in plain PyTorch without its score matrix: products stay promises until something needs their cells.

`fused` sees each function of torch that a program calls (block.py). A product of two matrices (products.py)
becomes a promise (promise.py), which says what its cells are (scores.py), and so do rows that are brought
to norm 1 (unit.py), masks of labels and of the diagonal (patterns.py, masks.py) and numbers of rows that
mostly cancel (terms.py). What a function gives of promises (calls.py) is up to rules (rules.py), and to
what it changes in place (in_place.py). Rules say what each function makes of that (closed.py), which loss
of fastqt ends it (ends/), where a few cells are enough (cells.py), and how both directions of a matrix
are computed together (directions.py, notes.py). What none of these knows is walked over (walk.py): a
function of cells, rows or columns (rows.py), of what is selected, set or put together (selections.py), is
computed for some rows at a time, and again for its gradients. What no rule knows gets the cells of the
program itself, by the functions that it has called, so that it is slower and never another.
"""

from fastqt.promises.block import fused as fused
from fastqt.promises.report import Report as Report

__all__ = ["Report"]  # `fused` is found in `fastqt`
