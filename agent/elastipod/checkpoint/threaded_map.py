"""Calls that wait for storage, several at once, in threads that never keep the process from ending.

Python waits for the threads of an executor before it ends, even for one in a call that never returns.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_in_threads(work: Callable[[T], R], items: Sequence[T], at_once: int, name: str) -> list[R]:
    """Call ``work`` for each item, for ``at_once`` at a time; return the results, or raise the error of the first that failed.

    This thread does its part, so it also works while Python exits and can start no thread. name: of the threads.
    """
    calls: list[tuple[T, Future[R]]] = [(each, Future()) for each in items]
    left = deque(calls)

    def run() -> None:
        with suppress(IndexError):  # none is left
            while True:
                _carry_out(work, *left.popleft())

    for _ in range(min(at_once, len(calls)) - 1):
        with suppress(RuntimeError):
            threading.Thread(target=run, name=name, daemon=True).start()
    run()
    return [future.result() for _, future in calls]


def _carry_out(work: Callable[[T], R], item: T, future: Future[R]) -> None:
    try:
        future.set_result(work(item))
    except BaseException as error:  # raised by who wants the result
        future.set_exception(error)
