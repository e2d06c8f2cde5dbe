"""How long a training takes: by the clock on the wall, and by what its process gets of the processors."""

from __future__ import annotations

import time
from typing import NamedTuple

from fastqt.sentences.runs.progress import Progress


class Moment(NamedTuple):
    """A moment of a training.

    On a machine that also does other work, the seconds of the processors tell trainings apart better than
    those that pass. All threads of this process count, those that compute and those that wait actively.
    """

    seconds: float  # of any clock
    cpu_seconds: float  # that this process has got of all processors

    @classmethod
    def now(cls) -> Moment:
        """This moment."""
        return cls(time.perf_counter(), time.process_time())

    def since(self, earlier: Moment) -> Moment:
        """The time between an earlier moment and this one."""
        return Moment(self.seconds - earlier.seconds, self.cpu_seconds - earlier.cpu_seconds)

    def add_to(self, progress: Progress) -> None:
        """Adds this time to those of a training's progress, in place."""
        progress.seconds += self.seconds
        progress.cpu_seconds += self.cpu_seconds
