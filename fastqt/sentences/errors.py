"""An error of a training on several processes; it imports no torch, as the command line may not."""

from fastqt.errors import InputError


class OtherRankError(InputError):
    """A process that trains together with this one has failed, and this one can not go on without it.

    `is_told` says whether another process says it too, so that this one need not.
    """

    def __init__(self, message: str, *, is_told: bool = False) -> None:
        super().__init__(message)
        self.is_told = is_told
