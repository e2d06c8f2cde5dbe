"""Groups of processes, which a file's tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.shared.ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """A group of so many processes, which is started when it is first asked for."""
    started: dict[int, Ranks] = {}

    def of_size(size: int) -> Ranks:
        if size not in started:
            started[size] = Ranks(size)
        return started[size]

    yield of_size
    for group in started.values():
        group.close()
