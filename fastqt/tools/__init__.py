"""What the command line shows beside training: a demonstration, a benchmark, plots."""
