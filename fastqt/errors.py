"""The error for what a user gave and can mend."""


class InputError(ValueError):
    """A file, an option or a directory cannot be used; the message says which, why, and what to change."""
