"""Entry of `python -m benchmarks.random_problems`, which is benchmarks/gpu/random_problems.py."""

import sys

from benchmarks.gpu.random_problems import main

if __name__ == "__main__":
    sys.exit(main())
