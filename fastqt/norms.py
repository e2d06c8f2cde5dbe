"""The norm that shorter rows are divided by, where rows are brought to norm 1."""

LEAST_NORM = 1e-12  # of `torch.nn.functional.normalize`
