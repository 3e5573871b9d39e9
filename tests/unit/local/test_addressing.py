"""Addresses of clusters: blocks never overlap, nodes and pods have places of their own."""

from __future__ import annotations

import random
from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.nonempty import every

from elastipod_local.addressing import (
    BLOCKS,
    LOOPBACK_RANGE,
    MAX_NODES,
    RANGE,
    Addressing,
    free_blocks,
    free_node_index,
)

IFNAMSIZ = 15


@given(block=st.integers(0, len(BLOCKS) - 1), index=st.integers(1, MAX_NODES))
def test_everything_of_a_cluster_lies_in_its_block_and_nowhere_twice(block: int, index: int) -> None:
    where = Addressing.for_block(block)
    networks = [where.node_network, where.service_network, where.pod_network(index)]
    assert every(network.subnet_of(BLOCKS[block]) and network.subnet_of(RANGE) for network in networks)
    assert not any(a.overlaps(b) for a in networks for b in networks if a is not b)
    assert where.node_address(index) in where.node_network
    assert where.node_address(index) != where.api_address
    assert where.service_api_address in where.service_network
    assert len(where.link_name(index)) <= IFNAMSIZ
    assert len(where.kernel_name) <= IFNAMSIZ


def test_nodes_of_a_cluster_never_share_an_address_or_pods() -> None:
    where = Addressing.for_block(3)
    indices = range(1, MAX_NODES + 1)
    assert len({where.node_address(index) for index in indices}) == MAX_NODES
    assert len({where.pod_network(index) for index in indices}) == MAX_NODES
    assert len({where.link_name(index) for index in indices}) == MAX_NODES


def test_clusters_never_share_a_loopback_address() -> None:
    blocks = {Addressing.for_block(block).loopback for block in range(len(BLOCKS))}
    assert len(blocks) == len(BLOCKS)
    rng = random.Random(1)
    loose = {Addressing.on_loopback(rng).loopback for _ in range(1000)}
    assert not blocks & loose
    assert every(address in LOOPBACK_RANGE for address in blocks | loose)


def test_without_a_block_the_api_server_listens_on_loopback() -> None:
    where = Addressing(None, IPv4Address("127.18.200.1"))
    assert where.api_url == "https://127.18.200.1:6443"


@pytest.mark.parametrize(
    ("networks", "links", "first"),
    [
        pytest.param([], [], 0, id="an idle machine gives the first block"),
        pytest.param(["0.0.0.0/0"], [], 0, id="a default route uses nothing"),
        pytest.param(["198.18.0.0/24"], [], 1, id="a route into a block takes it"),
        pytest.param(["198.18.40.7/32"], [], 0, id="a route into another block does not"),
        pytest.param([], ["elastipod0", "elastipod1"], 2, id="a bridge takes its block even without an address"),
        pytest.param(["198.0.0.0/8"], [], None, id="a route around the range takes all"),
    ],
)
def test_free_blocks(networks: list[str], links: list[str], first: int | None) -> None:
    free = free_blocks([IPv4Network(network) for network in networks], links)
    assert next(iter(free), None) == first


@pytest.mark.parametrize("index", [0, -1, MAX_NODES + 1])
def test_a_node_number_outside_the_range_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        Addressing.for_block(0).pod_network(index)


def test_the_lowest_free_number_is_given_to_a_new_node() -> None:
    assert free_node_index([1, 2, 4]) == 3
    assert free_node_index(range(1, MAX_NODES + 1)) is None
