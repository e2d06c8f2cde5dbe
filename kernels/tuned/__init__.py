"""Tables of tiles, one JSON file a GPU, that `python -m benchmarks.tune` measures and `tuning` reads."""
