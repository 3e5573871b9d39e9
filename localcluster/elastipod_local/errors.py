"""What a caller can do about a failure: read the sentence, or (Unsupported) go to another machine or become root."""

import errno
import subprocess


class LocalClusterError(Exception):
    """One sentence that says what was seen, what was expected, and what to do. The command line exits with 1."""


class UnsupportedError(LocalClusterError):
    """This machine or this user cannot do it at all. The command line exits with 2."""


class WaitedTooLongError(LocalClusterError):
    """What was waited for did not happen in time; nothing else went wrong."""


class CommandError(LocalClusterError):
    """A program that we ran failed; `returncode` and `output` (its last lines) are kept for the caller."""

    def __init__(self, message: str, returncode: int, output: str) -> None:
        super().__init__(message)
        self.returncode = returncode
        self.output = output


# What a folder refuses, as no network does.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
CLOSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def is_of_storage(error: BaseException) -> bool:
    """Tell whether an error comes from the disk that is written to, and not from the network that is read."""
    return isinstance(error, OSError) and error.errno in FULL | {errno.EROFS}


def what_the_machine_refused(error: OSError | subprocess.TimeoutExpired) -> str:
    """Give the sentence for an error of the machine that reached the outer edge of a command."""
    if isinstance(error, subprocess.TimeoutExpired):
        words = error.cmd if isinstance(error.cmd, str) else " ".join(map(str, error.cmd[:6]))
        return f"`{words}` did not end within {error.timeout:g} s"
    said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    if error.errno in FULL:
        return f"{said}; free some, or set XDG_CACHE_HOME to a folder on another disk"
    if error.errno in CLOSED and error.filename:
        return f"{said}; set XDG_CACHE_HOME to a folder that can be written if it is below the cache"
    return said
