"""Coverage-guided fuzzing of what reads files, and of the loss: `python -m tests.fuzz TARGET`.

A target is a module in targets/ with a function `run(data)`, which needs no fuzzer. Any exception that leaves
it is a finding. inputs/TARGET.zip holds the seeds of a target and every input that was a finding once, which
test_replay.py replays.
"""
