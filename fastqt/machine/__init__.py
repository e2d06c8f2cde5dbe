"""The losses on a machine: whether they are right on its devices, and their time and memory there."""
