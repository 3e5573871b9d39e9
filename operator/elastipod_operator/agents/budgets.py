"""How many bytes of what agents say may be held, for each job and for all together."""

from __future__ import annotations

from collections import Counter


class ByteBudget:
    """Counts bytes that are held for jobs.

    per_job: at most so many for each. in_all: at most so many for all; a job that holds no more than `free` is not refused for
    what others hold, so that nobody can take what a usual job needs.
    """

    def __init__(self, *, per_job: int, in_all: int, free: int) -> None:
        self._per_job, self._in_all, self._free = per_job, in_all, free
        self._held: Counter[str] = Counter()
        self.total = 0

    def change(self, job: str, by: int) -> bool:
        """Hold more or fewer bytes for a job. False when it would be too many: then nothing changes."""
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
