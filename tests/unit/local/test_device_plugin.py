"""A node's device plugin, called over its socket as kubelet calls it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest
from tests.patience import PATIENCE_S

from elastipod_local.device_plugin import DevicePlugin, protos, serve, services


class Kubelet:
    """Takes registrations."""

    def __init__(self) -> None:
        self.registered: Queue[Any] = Queue()

    def Register(self, request: Any, context: Any) -> Any:
        self.registered.put(request)
        return protos.Empty()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, because the path of a socket has room for 107 letters."""
    with TemporaryDirectory(prefix="plugins-") as made:
        yield Path(made)


@contextmanager
def kubelet_in(folder: Path) -> Iterator[Kubelet]:
    kubelet, pool = Kubelet(), ThreadPoolExecutor(1)
    server = grpc.server(pool)
    services.add_RegistrationServicer_to_server(kubelet, server)
    server.add_insecure_port(f"unix://{folder}/kubelet.sock")
    server.start()
    try:
        yield kubelet
    finally:
        server.stop(grace=None).wait()
        pool.shutdown()


@contextmanager
def served(folder: Path, count: int) -> Iterator[threading.Thread]:
    """A plugin that serves until its socket is removed, as a kubelet does when it starts again."""
    thread = threading.Thread(target=serve, args=(DevicePlugin(count, folder / "sick"), folder))
    thread.start()
    try:
        yield thread
    finally:
        (folder / "elastipod.sock").unlink(missing_ok=True)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def told(answer: Any) -> list[tuple[str, str]]:
    return [(one.ID, one.health) for one in answer.devices]


def test_kubelet_hears_of_all_units_and_of_the_sick_one_until_it_starts_again(folder: Path) -> None:
    with kubelet_in(folder) as kubelet, served(folder, 2):
        request = kubelet.registered.get(timeout=PATIENCE_S)
        assert (request.version, request.resource_name) == ("v1beta1", "elastipod.io/slot")
        with grpc.insecure_channel(f"unix://{folder / request.endpoint}") as channel:
            plugin = services.DevicePluginStub(channel)
            assert plugin.GetDevicePluginOptions(protos.Empty(), timeout=PATIENCE_S) == protos.DevicePluginOptions()
            stream = plugin.ListAndWatch(protos.Empty(), timeout=PATIENCE_S)
            assert told(next(stream)) == [("slot-0", "Healthy"), ("slot-1", "Healthy")]
            (folder / "sick").touch()
            assert told(next(stream)) == [("slot-0", "Unhealthy"), ("slot-1", "Healthy")]
            (folder / "sick").unlink()
            assert told(next(stream)) == [("slot-0", "Healthy"), ("slot-1", "Healthy")]
            stream.cancel()


def test_a_container_is_told_its_units(folder: Path) -> None:
    asked = protos.AllocateRequest(
        container_requests=[protos.ContainerAllocateRequest(devices_ids=["slot-0", "slot-1"])]
    )
    (answer,) = DevicePlugin(2, folder / "sick").Allocate(asked, None).container_responses
    assert dict(answer.envs) == {"SLOT_UNITS": "slot-0,slot-1"}
