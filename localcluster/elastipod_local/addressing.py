"""Addresses of clusters that live side by side on one machine. Pure arithmetic; nothing here looks at the machine.

198.18.0.0/15 is set aside for benchmarks (RFC 2544), so it collides with no LAN or VPN. Each cluster has one of its
16 blocks of /19: the first /24 holds the bridge and the nodes, the second the Services, the others one node's pods each.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

RANGE = IPv4Network("198.18.0.0/15")
BLOCKS = list(RANGE.subnets(new_prefix=19))
MAX_NODES = 30
FIRST_NODE_HOST = 10
API_PORT = 6443
ETCD_PORT = 2379
ETCD_PEER_PORT = 2380
KUEUE_WEBHOOK_PORT = 9443
KUEUE_HEALTH_PORT = 8081
LOOPBACK_RANGE = IPv4Network("127.18.0.0/16")
UNUSED_LOOPBACK = LOOPBACK_RANGE[1]  # no cluster's: only who listens on all addresses has a port there


@dataclass(frozen=True, slots=True)
class Addressing:
    """Every address and kernel name of one cluster.

    block: number of its /19, None when the cluster has no nodes and listens on loopback only.
    loopback: the 127.18.x.y on which etcd and Kueue listen (and the API server, when there is no block).
    """

    block: int | None
    loopback: IPv4Address

    @classmethod
    def for_block(cls, block: int) -> "Addressing":
        """Give the addresses of a cluster with a bridge. Raises ValueError outside 0..15."""
        if not 0 <= block < len(BLOCKS):
            raise ValueError(f"block {block} is outside 0..{len(BLOCKS) - 1}")
        return cls(block, LOOPBACK_RANGE[256 + block])

    @classmethod
    def on_loopback(cls, rng: random.Random) -> "Addressing":
        """Give a random loopback address, out of the half of the range that `for_block` never uses."""
        return cls(None, LOOPBACK_RANGE[rng.randrange(32768, 65535)])

    @property
    def _network(self) -> IPv4Network:
        # Without nodes nothing is routed, and any block serves for the Service range.
        return BLOCKS[self.block or 0]

    @property
    def node_network(self) -> IPv4Network:
        return next(self._network.subnets(new_prefix=24))

    @property
    def service_network(self) -> IPv4Network:
        return list(self._network.subnets(new_prefix=24))[1]

    @property
    def cluster_network(self) -> IPv4Network:
        """The whole block: nodes, Services and pods."""
        return self._network

    @property
    def api_address(self) -> IPv4Address:
        """Address of the API server: the bridge, or loopback when there are no nodes."""
        return self.loopback if self.block is None else self.node_network[1]

    @property
    def api_url(self) -> str:
        return f"https://{self.api_address}:{API_PORT}"

    @property
    def service_api_address(self) -> IPv4Address:
        """The Service `kubernetes`, as pods see the API server."""
        return self.service_network[1]

    @property
    def kernel_name(self) -> str:
        """Name of the bridge and of the cgroup folder."""
        return f"elastipod{self.block}"

    @property
    def hardware_address(self) -> str:
        """The bridge's own address on its wires, one of those that anybody may choose."""
        return f"02:00:00:00:00:{self.block or 0:02x}"

    def node_address(self, index: int) -> IPv4Address:
        """Address of node `index`, from 1. Raises ValueError beyond MAX_NODES."""
        _check_node(index)
        return self.node_network[FIRST_NODE_HOST + index]

    def pod_network(self, index: int) -> IPv4Network:
        """The pods of node `index`, from 1. Raises ValueError beyond MAX_NODES."""
        _check_node(index)
        return list(self._network.subnets(new_prefix=24))[1 + index]

    def link_name(self, index: int) -> str:
        """The host's end of the wire to node `index`; at most 15 letters, as the kernel asks."""
        _check_node(index)
        return f"epod{self.block}-node{index}"


def _check_node(index: int) -> None:
    if not 1 <= index <= MAX_NODES:
        raise ValueError(f"node {index} is outside 1..{MAX_NODES}")


def free_blocks(addresses_in_use: Iterable[IPv4Network], links_in_use: Iterable[str]) -> list[int]:
    """Give the blocks that no link or route of the machine touches, lowest first."""
    used, names = list(addresses_in_use), set(links_in_use)
    return [
        number
        for number, network in enumerate(BLOCKS)
        if f"elastipod{number}" not in names and not any(network.overlaps(other) for other in used if other.prefixlen)
    ]


def free_node_index(taken: Iterable[int]) -> int | None:
    """Give the lowest node number that is not taken, None when all are."""
    used = set(taken)
    return next((index for index in range(1, MAX_NODES + 1) if index not in used), None)
