"""Commands beside training: a demonstration, a benchmark and plots."""
