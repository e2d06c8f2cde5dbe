"""Functions of scores that a loss of fastqt computes, by what ends them.

Cross-entropies and log-probabilities (cross_entropies.py), sums of exponentials and their logarithm
(exponentials.py), sums over rows of what has weights or signs (sums.py, weights.py), and losses of each score
by itself (binary.py). How scores become the arguments of a loss is in arguments.py.
"""

from fastqt.promises.ends import binary as binary
from fastqt.promises.ends import cross_entropies as cross_entropies
from fastqt.promises.ends import exponentials as exponentials
from fastqt.promises.ends import sums as sums
