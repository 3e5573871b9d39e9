"""Checkpoints of other runs in the same directory."""

from __future__ import annotations

import logging
from contextlib import suppress

from elastipod.checkpoint.store import CheckpointStore
from elastipod.errors import CheckpointError
from elastipod.rank_in_world import RankInWorld

log = logging.getLogger(__name__)


def warn_if_other_run_is_ahead(store: CheckpointStore, step: int, keep: int) -> None:
    """Warn a run that did not resume from the newest step of any run, because the next resume takes that one."""
    if RankInWorld.current().rank != 0:
        return
    with suppress(OSError, CheckpointError):
        ahead = next((each for each in store.list_complete() if each.step >= step), None)
        if ahead is not None:
            log.warning(
                "%s holds the checkpoint of step %d, which this run did not resume from: until %d saves of this run have replaced "
                "it, a resume would return to it; call load_latest first, or name another directory",
                store.name, ahead.step, keep,
            )  # fmt: skip
