"""Has forked workers wait for the store of rank 0 with `elastipod.store_wait`, in place of torch's long back-off."""

from __future__ import annotations

import functools
import sys
from typing import Any

from elastipod.store_wait import wait_until_listening

LIMIT_S = 2.0  # afterwards torch's own back-off takes over: rank 0 is more than a little late
_POSITIONS = ("host_name", "port", "world_size", "is_master")  # of the constructor of TCPStore


def install() -> None:
    """In the fork server, after the import of torch: make clients of ``env://`` and ``tcp://`` wait for the store."""
    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
    if rendezvous is not None and hasattr(rendezvous, "TCPStore"):
        rendezvous.TCPStore = patient(rendezvous.TCPStore)


def patient(store: Any) -> Any:
    """Wrap a constructor so that a client first waits until the store listens. Other uses are unchanged."""

    @functools.wraps(store, updated=())
    def connect(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(_POSITIONS, args, strict=False)), **kwargs}  # torch 2.4 names none of them
        host, port = given.get("host_name"), given.get("port")
        if given.get("is_master") is False and isinstance(host, str) and isinstance(port, int):
            world_size = given.get("world_size")
            wait_until_listening(host, port, LIMIT_S, world_size if isinstance(world_size, int) else 1)
        return store(*args, **kwargs)

    return connect
