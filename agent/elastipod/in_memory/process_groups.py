"""The process groups of one generation: built over a store of the generation's own, and taken down together."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastipod.errors import ElastipodError
from elastipod.in_memory.agent_link import WorldPlace
from elastipod.in_memory.phases import LIMITS, Phase
from elastipod.torch_compat import abort_groups, set_group_timeout

log = logging.getLogger(__name__)

TRY_S = 2.0  # one try to connect all ranks, once all have arrived at the store
MAX_TRIES = 5
_OK, _FAILED = "ok", "failed"


class WorldNotBuilt(ElastipodError):
    """The ranks of a generation did not come together, or one was lost on the way: the next generation follows."""


class ProcessGroups:
    """The default process group of this rank, in one generation after the other."""

    def __init__(self, backend: str | None, timeout: timedelta | None) -> None:
        self._backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        self._timeout = timeout or dist.distributed_c10d.default_pg_timeout
        self._store: Any = None
        self._former_store: Any = None

    def connect(self, place: WorldPlace) -> None:
        """Build the default process group of a generation. Raises WorldNotBuilt.

        Every rank reports its arrival at the store before any connects, so a slow rank costs no try. The first verdict on a try
        counts for all ranks: they train in the same group, or try again under another name together.
        """
        limit = LIMITS[Phase.CONNECTING]
        assert limit is not None
        deadline = time.monotonic() + limit.total_seconds()
        try:
            self._store = self._open_store(place, deadline)
            for number in range(MAX_TRIES):
                if self._try(dist.PrefixStore(f"try/{number}", self._store), place, deadline):  # type: ignore[attr-defined]
                    self._former_store = None  # every rank that read it is here
                    return
                if time.monotonic() >= deadline:
                    break
        except (RuntimeError, TimeoutError) as error:  # torch's store errors are RuntimeErrors
            raise WorldNotBuilt(
                f"generation {place.generation} cannot meet at its store: {_first_line(error)}"
            ) from error
        raise WorldNotBuilt(f"the {place.world_size} ranks of generation {place.generation} could not connect")

    def begin_training(self) -> None:
        """Give collectives the time that the script's own may take; until now they had the limits of the regroup."""
        set_group_timeout(self._timeout)

    def leave(self) -> None:
        """Take all groups down. Peers that are still inside a collective with this rank see it fail."""
        if dist.is_initialized():
            if dist.get_backend() != "gloo":
                abort_groups()
            with suppress(RuntimeError):  # the group is broken already and is no longer used
                dist.destroy_process_group()
        # The server of a store that this process hosts stays until the next world is built: others may be reading it.
        self._former_store, self._store = self._store or self._former_store, None

    def _open_store(self, place: WorldPlace, deadline: float) -> Any:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # public, though torch does not mark it so
            place.address,
            place.port,
            is_master=place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=_left(deadline),
            wait_for_workers=False,
            multi_tenant=True,
        )
        return dist.PrefixStore(f"elastipod/world/{place.generation}", store)  # type: ignore[attr-defined]

    def _try(self, store: Any, place: WorldPlace, deadline: float) -> bool:
        if store.add("arrived", 1) == place.world_size:
            store.set("all-arrived", "1")
        store.wait(["all-arrived"], _left(deadline))
        try:
            dist.init_process_group(
                self._backend,
                store=store,
                rank=place.rank,
                world_size=place.world_size,
                timeout=timedelta(seconds=TRY_S),
            )
            own = _OK if store.add("connected", 1) == place.world_size else ""
        except RuntimeError as error:
            log.info("rank %d could not connect to its peers: %s", place.rank, _first_line(error))
            own = _FAILED
        if own:
            store.compare_set("verdict", "", own)
        if _verdict(store, deadline) == _OK:
            return True
        with suppress(RuntimeError):  # half a group
            if dist.is_initialized():
                dist.destroy_process_group()
        return False


def _verdict(store: Any, deadline: float) -> str:
    """Wait for the verdict on a try. A rank that waits longer than the others may take for it gives it itself."""
    try:
        store.wait(["verdict"], min(_left(deadline), timedelta(seconds=2 * TRY_S)))
    except RuntimeError:
        store.compare_set("verdict", "", _FAILED)
    return str(store.get("verdict").decode())


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.05, deadline - time.monotonic()))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
