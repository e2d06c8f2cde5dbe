"""Makes the input of a finding smaller, as long as the finding stays the same."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.findings import signature

TRIES = 4000


def minimised(run: Callable[[bytes], bool], data: bytes) -> bytes:
    """The shortest input that was found to raise what `data` raises: pieces removed, then bytes made zero."""
    wanted = _signature(run, data)
    if wanted is None:
        return data

    tries = 0
    size = len(data) // 2
    while size:
        start = 0
        while start < len(data) and tries < TRIES:
            shorter = data[:start] + data[start + size :]
            tries += 1
            if _signature(run, shorter) == wanted:
                data = shorter
            else:
                start += size
        size //= 2

    for place in range(len(data)):
        zeroed = data[:place] + b"\0" + data[place + 1 :]
        if _signature(run, zeroed) == wanted:
            data = zeroed

    return data


def _signature(run: Callable[[bytes], bool], data: bytes) -> str | None:
    try:
        run(data)
    except Exception as error:
        return signature(error)
    return None
