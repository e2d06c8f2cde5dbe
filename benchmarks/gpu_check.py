"""Entry of `python -m benchmarks.gpu_check`, which is benchmarks/gpu/check.py."""

import sys

from benchmarks.gpu.check import main

if __name__ == "__main__":
    sys.exit(main())
