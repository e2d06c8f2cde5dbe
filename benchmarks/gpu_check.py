"""Checks and measures fastqt on a GPU: does each part work at all, how fast is it, are all its results right.

Nothing has to be installed. In a checkout of this repository, with a Python that has torch and Triton, type

    python -m benchmarks.gpu_check --stage first  --out first.json     # 1: smoke steps, profiles, builds
    python -m benchmarks.gpu_check --stage speed  --out speed.json     # 2: tunes bfloat16, then measures
    python -m benchmarks.gpu_check --stage checks --out checks.json    # 3: every check, and the sanitizer

in this order. Each takes less than nine minutes, whatever hangs, and ends with a text of at most 100 lines;
the file has everything, and is written anew after each section. Mend what fails in the first stage before you
run the second, which writes the tiles that it found to kernels/tuned/.

    python -m benchmarks.gpu_check                                     # all but tuning, in one run

stores benchmarks/results/gpu/*.json. `--quick` does less of everything. `--dry-run` runs tiny problems on a
CPU, in Triton's interpreter: it shows that the checks work, prints no times, and stores its results only
where `--out PATH` says.

The first stage ends with a build of the native extension in place, as `python setup.py build_ext --inplace`
does, if nvcc, setuptools, ninja and a C++ compiler are there. Without them, or where fastqt/_C.abi3.so is
of another machine, the results say so, and everything but the one-launch kernel is measured.

Each section runs in its own process within a time limit. Where one hangs, the tracebacks of all its threads
are stored; where a kernel fails, its arguments are, and what Triton compiled. The exit status is 1 if a check
or a section failed.
"""

import sys

from benchmarks.gpu.check import main

if __name__ == "__main__":
    sys.exit(main())
