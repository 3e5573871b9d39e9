"""What is left of a process group after its generation."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.free_ports import free_port
from tests.unit.in_memory.models import Compiled
from tests.unit.torch_processes import TorchProcesses
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from elastipod.in_memory.agent_link import WorldPlace
from elastipod.in_memory.collective_failure import forget_frames, is_collective_failure
from elastipod.in_memory.memory_state import WorldLost
from elastipod.in_memory.process_groups import ProcessGroups
from elastipod.torch_compat import detach_reducer, drop_sharding_caches, release_shard_groups

PEER_THAT_HANGS = """
import os, signal, sys
import torch.distributed as dist
from datetime import timedelta
from elastipod.in_memory.agent_link import WorldPlace
from elastipod.in_memory.process_groups import ProcessGroups
ProcessGroups("gloo", timedelta(seconds=90)).connect(WorldPlace(1, 1, 2, "127.0.0.1", int(sys.argv[1])), lambda: False)
other = dist.new_group([0, 1])
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def hanging_peer(torch_processes: TorchProcesses, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Give the port of a world of two, of which rank 1 hangs as soon as it is connected."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    port = free_port()
    with torch_processes.start(PEER_THAT_HANGS, str(port)):
        yield port
    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("is_default", [True, False], ids=["the default group", "a group that was made later"])
def test_a_rank_that_waits_for_a_peer_that_hangs_is_freed_by_an_abort(hanging_peer: int, is_default: bool) -> None:
    """As after the loss of a node's power or network: no connection closes. A kill of the peer would free it; nobody kills it here."""
    groups = ProcessGroups("gloo", timedelta(seconds=90))
    groups.connect(WorldPlace(1, 0, 2, "127.0.0.1", hanging_peer), lambda: False)
    groups.begin_training()
    other: Any = dist.new_group([0, 1])
    abort = threading.Timer(0.5, groups.abort)
    abort.start()
    with pytest.raises(RuntimeError, match="Connection closed") as raised:
        dist.all_reduce(torch.ones(3), group=None if is_default else other)
    abort.join()
    assert is_collective_failure(raised.value, lambda _: False)
    groups.close(has_finished=True)


@pytest.mark.parametrize("is_aborted", [False, True], ids=["a planned change", "a fault"])
def test_groups_of_several_backends_end_and_are_built_anew(is_aborted: bool) -> None:
    """As with NCCL, whose groups carry host memory through gloo: "cpu:gloo,cuda:nccl"."""
    groups, hook = ProcessGroups("cpu:gloo", timedelta(seconds=90)), sys.excepthook
    for _ in range(3):
        groups.connect_alone()
        assert dist.get_backend() != "gloo"
        if is_aborted:
            groups.abort()
            assert dist.is_initialized(), "a rank that is on its way to a collective is not alone"
        groups.leave()
        assert not dist.is_initialized()
    groups.await_former()
    assert hook in (sys.excepthook, groups._hooks[0]), "torch's own prefix is there once"


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_the_connections_of_a_detached_model_go_with_its_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    model = DistributedDataParallel(nn.Linear(4, 2))
    loss = model(torch.ones(3, 4)).sum()  # kept, as the variable of a loop is
    loss.backward()
    group = weakref.ref(model.process_group)
    detach_reducer(model)
    detach_reducer(model)  # once more does no harm
    dist.destroy_process_group()
    assert group() is None, "somebody still holds the group, and a peer would wait for it"
    assert loss.requires_grad


@pytest.mark.usefixtures("no_collection")
def test_a_detached_model_that_was_compiled_after_it_was_wrapped_reduces_no_more() -> None:
    bare = nn.Linear(4, 2)
    kept = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        ddp = DistributedDataParallel(bare)
        kept.append(Compiled(ddp))
        kept[-1](torch.ones(3, 4)).sum().backward()  # of a former world, this would fail
        group = weakref.ref(ddp.process_group)
        del ddp
        detach_reducer(kept[-1])
        dist.destroy_process_group()
        assert group() is None


@pytest.mark.usefixtures("no_collection")
def test_an_error_of_a_collective_does_not_keep_its_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    kept = weakref.ref(dist.group.WORLD)

    def fails(group: object) -> None:
        raise RuntimeError("Connection closed by peer")

    error: BaseException | None = None
    try:
        try:
            fails(dist.group.WORLD)
        except RuntimeError as failed:
            raise WorldLost("lost") from failed
    except WorldLost as raised:
        error = raised
    dist.destroy_process_group()
    assert kept() is not None, "a frame holds it"
    forget_frames(error)
    assert kept() is None
    assert error is not None
    assert error.__traceback__ is not None


def test_the_connections_of_a_sharded_model_go_with_its_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    fully_shard(model[0], mesh=(mesh := init_device_mesh("cpu", (1,))))
    fully_shard(model, mesh=mesh)
    loss = model(torch.ones(3, 4)).sum()  # kept, as the variable of a loop is
    loss.backward()
    kept = weakref.ref(dist.group.WORLD)
    release_shard_groups(model)
    release_shard_groups(model)  # once more does no harm
    drop_sharding_caches()
    dist.destroy_process_group()
    gc.collect()
    assert kept() is None, "somebody still holds the group, and a peer would wait for it"
    assert loss.requires_grad
    assert len(list(model.parameters())) == 4
