"""Entry of `python -m benchmarks.tune`, which is benchmarks/gpu/tune.py."""

import sys

from benchmarks.gpu.tune import main

if __name__ == "__main__":
    sys.exit(main())
