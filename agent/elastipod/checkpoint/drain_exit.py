"""Leaving in a drain: whether the ranks exit with the newest step in memory, without waiting for durable storage. Collective."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from elastipod.checkpoint import drain
from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.saver import Save
from elastipod.checkpoint.staging import Staging
from elastipod.json_records import decode, encode
from elastipod.rank_in_world import RankInWorld

log = logging.getLogger(__name__)

_OLDER_MEMORY_S = 2.0  # however short the drain is, for an earlier step to be in memory


def drain_notices(comm: Communicator) -> list[drain.DrainNotice | None]:
    """Return the drain as each rank knows it, by rank."""

    def known() -> Any:
        found = drain.current_drain()
        return encode(found) if found else None

    answers = comm.training_all_reduce(known, lambda of_ranks: of_ranks)
    return [decode(drain.DrainNotice, each) if each else None for each in answers]


def is_given_up_for_newer(comm: Communicator, staging: Staging, previous: Save) -> bool:
    """In a drain, return whether an earlier save is abandoned for a newer step; the same on every rank.

    Where memory survives a short drain, it is abandoned at once. Else it goes first, because it needs less time than the newer one;
    it is abandoned when there is just time left to copy the newer step to memory, as long as that took for the earlier one.
    """
    notices = drain_notices(comm)
    if not any(notices):
        return False
    _wait_for_storage(staging, previous, notices, is_for_newer=True)
    return not comm.training_all_reduce(lambda: not previous.thread.is_alive(), all)


def _wait_for_storage(
    staging: Staging, save: Save, notices: Sequence[drain.DrainNotice | None], *, is_for_newer: bool = False
) -> None:
    """Wait until a save is durable, as long as the drain allows: not at all where memory survives it and time is short.

    is_for_newer: a newer step must still be copied to memory afterwards.
    """
    left_s = [each.left_s for each in notices if each]
    least_s = min(left_s)
    passed_s = _await_memory(
        save,
        max(_OLDER_MEMORY_S, least_s - drain.EXIT_MARGIN_S) if is_for_newer else max(drain.EXIT_MARGIN_S, least_s),
    )
    leaves = [each.leaves if each else None for each in notices]
    survives_drain = save.is_kept_in_memory and staging.survives_drain(save.staged.plan, leaves)
    reserve_s = passed_s + (save.memory_s if is_for_newer else 0.0)
    if wait_s := drain.storage_wait_s(left_s, survives_drain=survives_drain, reserve_s=reserve_s):
        save.go_on()
        if save.given_up is None:
            save.thread.join(wait_s)


def _await_memory(save: Save, limit_s: float) -> float:
    """Wait until memory has the step or will not; return how long that took, in seconds. It may need storage that does not answer."""
    if save.memory_settled.is_set():
        return 0.0
    began = time.monotonic()
    save.memory_settled.wait(limit_s)
    return time.monotonic() - began


def exits_with_memory(comm: Communicator, staging: Staging, save: Save) -> bool:
    """In a drain, return whether to exit without waiting for durable storage any longer; the same on every rank."""
    notices = drain_notices(comm)
    if not any(notices):
        return False
    _wait_for_storage(staging, save, notices)
    is_written, is_kept = comm.training_all_reduce(
        lambda: [not save.thread.is_alive(), save.is_kept_in_memory],
        lambda answers: [*map(all, zip(*answers, strict=True))],
    )
    if is_written or not is_kept:
        return False
    if RankInWorld.current().rank == 0:
        log.info(
            "exiting with step %d in memory: there is no time to wait for durable storage; the next generation writes it",
            save.staged.id.step,
        )
    return True
