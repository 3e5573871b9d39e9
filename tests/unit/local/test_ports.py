"""Ports that another program listens on at all addresses: told before anything is built, with the program's name."""

from __future__ import annotations

import os
import socket

import pytest

from elastipod_local import ports
from elastipod_local.addressing import KUEUE_HEALTH_PORT, KUEUE_WEBHOOK_PORT, UNUSED_LOOPBACK, Addressing
from elastipod_local.errors import LocalClusterError
from elastipod_local.host import find_program


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_ports_that_nobody_has_are_fine() -> None:
    ports.require_free({free_port(): "etcd"})


def test_a_server_on_one_other_address_is_no_obstacle() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports.require_free({server.getsockname()[1]: "etcd"})


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")])
def test_a_server_on_all_addresses_is_named(family: socket.AddressFamily, address: str) -> None:
    dual = family == socket.AF_INET6
    with socket.create_server((address, 0), family=family, dualstack_ipv6=dual) as server:
        port = server.getsockname()[1]
        with pytest.raises(LocalClusterError) as told:
            ports.require_free({port: "kube-apiserver"})
    assert f"port {port}, on which the cluster's kube-apiserver listens, is taken on all addresses" in str(told.value)
    if find_program("ss"):
        assert f"(pid {os.getpid()})" in str(told.value)


def test_a_program_that_cannot_be_named_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "find_program", lambda name: None)
    with (
        socket.create_server(("0.0.0.0", 0)) as server,
        pytest.raises(LocalClusterError, match="by another program; end it, or let it listen on one address"),
    ):
        ports.require_free({server.getsockname()[1]: "etcd"})


def test_kueues_ports_matter_only_where_there_is_kueue() -> None:
    assert {KUEUE_WEBHOOK_PORT, KUEUE_HEALTH_PORT} == set(ports.of_cluster(with_kueue=True)) - set(
        ports.of_cluster(with_kueue=False)
    )


def test_no_cluster_has_the_address_that_is_tried() -> None:
    assert UNUSED_LOOPBACK not in {Addressing.for_block(block).loopback for block in range(16)}
