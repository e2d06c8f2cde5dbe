"""Which kernels are compiled anew for a batch of another size, on an H100 that is only described.

python -m tests.shared.specialisations 1024 512 1000      # batches one after the other

A line of JSON is printed for each: the names of the kernels that none of the batches before has compiled.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.pop("TRITON_INTERPRET", None)  # before anything imports fastqt.kernels

from tests.shared.launches import GPUS, Case, Launch, noted, specialised

if __name__ == "__main__":
    (hopper,) = (gpu for gpu in GPUS if gpu.arch == 90)
    known = set()
    for N in map(int, sys.argv[1:]):
        new = []
        for launch in noted(Case("", N=N, targets="own", diagonal="keep"), hopper):
            if isinstance(launch, Launch):
                asked = launch.kernel.__name__, repr((specialised(launch), sorted(launch.options.items())))
                if asked not in known:
                    known.add(asked)
                    new.append(launch.kernel.__name__)
        print(json.dumps(new))
