"""What a caller can do about a failure: read the sentence, or (Unsupported) go to another machine or become root."""


class LocalClusterError(Exception):
    """One sentence that says what was seen, what was expected, and what to do. The command line exits with 1."""


class UnsupportedError(LocalClusterError):
    """This machine or this user cannot do it at all. The command line exits with 2."""


class CommandError(LocalClusterError):
    """A program that we ran failed; `returncode` and `output` (its last lines) are kept for the caller."""

    def __init__(self, message: str, returncode: int, output: str) -> None:
        super().__init__(message)
        self.returncode = returncode
        self.output = output
