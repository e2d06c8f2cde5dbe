"""Fuzzing of the C++ operators by libFuzzer: `python -m tests.fuzz.native TARGET --minutes 10`.

A target calls operators of csrc/cpu as torch does. An input stands for tensors of all sizes, dtypes, layouts
and values, well-formed or not. An operator must refuse it or stay within its tensors. Half of the inputs are
tame: valid problems with values of order 1, whose results must be finite and must not depend on tiles.
"""
