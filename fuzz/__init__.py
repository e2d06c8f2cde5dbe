"""Coverage-guided fuzzing of all that reads files, and of the loss: `python -m fuzz TARGET --minutes 10`.

A target is a module in fuzz/targets with a function `run(data)`, which needs no fuzzer. Any exception that
leaves it is a finding. fuzz/corpus holds the seeds of each target, and fuzz/regressions every input that was
a finding once; tests/fuzz replays both.
"""
