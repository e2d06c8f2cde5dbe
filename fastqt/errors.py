"""The errors that tell the user what to correct."""


class InputError(ValueError):
    """A file, a directory or an option cannot be used. The message says which, why, and what to change."""


def one_line(text: object, longest: int = 300) -> str:
    """Text that comes from a file, for a message: on one line, without control characters, not too long."""
    characters = (
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(text)
    )
    return "".join(characters)[:longest]
