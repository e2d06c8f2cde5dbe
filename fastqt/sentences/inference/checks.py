"""Checks of sentences that a user types."""

from __future__ import annotations

from fastqt.errors import InputError


def check_sentence(name: str, text: str) -> None:
    """Refuses a text that no model can encode: one that is blank or, on a command line, was not UTF-8."""
    if not text.strip():
        raise InputError(f"{name}: want a sentence, got blank text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{name}: want text in UTF-8, got {text!r}") from None
