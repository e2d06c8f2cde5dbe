"""What several tests share: oracles in numpy float64, cases, tolerances, and the functions that ranks run."""
