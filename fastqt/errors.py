"""The error for input that the user can correct."""


class InputError(ValueError):
    """A file, a directory or an option cannot be used. The message says which, why, and what to change."""
