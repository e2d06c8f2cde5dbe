"""The errors that tell the user what to correct."""


class InputError(ValueError):
    """A file, a directory or an option cannot be used. The message says which, why, and what to change."""


class OtherRankError(InputError):
    """A process that trains together with this one has failed, and this one can not go on without it.

    Attributes:
        is_told: whether another process says it too, so that this one need not.
    """

    def __init__(self, message: str, *, is_told: bool = False) -> None:
        super().__init__(message)
        self.is_told = is_told
