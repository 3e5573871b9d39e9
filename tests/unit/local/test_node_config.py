"""The configuration of nodes, and what is read from their status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastipod_local import node_config
from elastipod_local.addressing import Addressing
from elastipod_local.node_config import SLOT_RESOURCE, InitConfig
from elastipod_local.nodes import is_ready
from elastipod_local.state import NodeOptions

WHERE = Addressing.for_block(2)


@pytest.mark.parametrize(
    ("options", "held"),
    [
        pytest.param(NodeOptions(), {}, id="without wishes a node offers the machine"),
        pytest.param(NodeOptions(cpus=0.5), {"cpu": "3500m"}, id="cpus"),
        pytest.param(NodeOptions(memory_mib=1024), {"memory": "7168Mi"}, id="memory"),
        pytest.param(NodeOptions(cpus=8, memory_mib=9000), {}, id="more than the machine has is the machine"),
    ],
)
def test_reserved(options: NodeOptions, held: dict[str, str]) -> None:
    assert node_config.reserved(options, cpus=4, memory_mib=8192) == held


def test_kubelet_listens_on_the_node_alone_and_lets_nobody_in_unasked() -> None:
    config = json.loads(node_config.kubelet(WHERE, 3, NodeOptions(), cpus=2, memory_mib=100))
    assert config["address"] == str(WHERE.node_address(3))
    assert config["authentication"]["anonymous"] == {"enabled": False}
    assert config["authorization"] == {"mode": "Webhook"}


def test_the_base_spec_gains_one_read_only_mount_however_often() -> None:
    plain = json.dumps({"mounts": [{"destination": "/proc"}], "process": {"rlimits": [1], "cwd": "/"}})
    once = node_config.base_spec(plain, Path("/cache/site"))
    assert node_config.base_spec(once, Path("/cache/site")) == once
    spec = json.loads(once)
    assert spec["process"] == {"cwd": "/"}
    added = spec["mounts"][-1]
    assert (added["destination"], added["source"]) == (node_config.SITE_PACKAGES_MOUNT, "/cache/site")
    assert "ro" in added["options"]


def test_pods_of_a_node_get_addresses_of_its_own_network() -> None:
    plugin = json.loads(node_config.cni(WHERE, 4))["plugins"][0]
    assert plugin["ipam"]["ranges"] == [[{"subnet": str(WHERE.pod_network(4))}]]


def test_init_config_reads_back_as_it_was_written() -> None:
    config = InitConfig("n", "/f", "/l", "/s", ("/a",), (("/sys/fs/cgroup", "cgroup2", ""),), {"a": ["b"]})
    assert InitConfig.decode(config.encode()) == config


def node(ready: str, **capacity: str) -> dict[str, Any]:
    return {"status": {"conditions": [{"type": "Ready", "status": ready}], "capacity": {**capacity}}}


@pytest.mark.parametrize(
    ("found", "slots", "expected"),
    [
        pytest.param(node("True", **{SLOT_RESOURCE: "1"}), 1, True, id="ready with its slot"),
        pytest.param(node("True"), 1, False, id="no device plugin has registered yet"),
        pytest.param(node("True"), 0, True, id="no slot is wanted"),
        pytest.param(node("Unknown", **{SLOT_RESOURCE: "1"}), 1, False, id="not heard of"),
        pytest.param({}, 0, False, id="just registered"),
    ],
)
def test_is_ready(found: dict[str, Any], slots: int, expected: bool) -> None:
    assert is_ready(found, slots) is expected


@pytest.mark.parametrize("slots", [0, 2])
def test_a_node_with_units_of_an_accelerator_has_a_device_plugin(slots: int) -> None:
    commands = node_config.services("n", {"kubelet": Path("/k"), "kube-proxy": Path("/p")}, WHERE, 3, slots)
    assert [command[-1] for name, command in commands.items() if name == "device-plugin"] == ["2"] * (slots > 0)
