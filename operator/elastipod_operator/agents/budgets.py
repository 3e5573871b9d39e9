"""Limits on the bytes of agents' responses that are held, per job and in total."""

from __future__ import annotations

from collections import Counter


class ByteBudget:
    """Counts bytes that are held for jobs.

    per_job: the limit for each job. in_all: the limit for all together; a job below `free` is never refused because of others, so
    that no job can take what a usual job needs.
    """

    def __init__(self, *, per_job: int, in_all: int, free: int) -> None:
        self._per_job, self._in_all, self._free = per_job, in_all, free
        self._held: Counter[str] = Counter()
        self.total = 0

    def change(self, job: str, by: int) -> bool:
        """Hold more or fewer bytes for a job. False, without any change, if that would exceed a limit."""
        wanted = self._held[job] + by
        if by > 0 and (wanted > self._per_job or (wanted > self._free and self.total + by > self._in_all)):
            return False
        self.total += by
        self._held[job] = wanted
        if not wanted:
            del self._held[job]
        return True

    def held(self, job: str) -> int:
        """Give how many bytes are held for a job."""
        return self._held[job]
