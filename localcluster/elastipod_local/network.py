"""The bridge of a cluster and the wires to its nodes."""

import json
import sys
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from elastipod_local.addressing import Addressing, free_blocks
from elastipod_local.host import last_lines, run, wait_until
from elastipod_local.processes import tagged

LINKS = Path("/sys/class/net")
# Held from choosing a block until its bridge carries its owner's name, and while a bridge is taken down.
# Not in /run/lock, where every user can put a file or a link of that name.
ALLOCATION_LOCK = Path("/run/elastipod-local.lock")
ALLOCATION_WAIT_S = 120
_CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3).close()
except OSError as refused:
    sys.exit(refused.strerror or str(refused))
"""


def free_addressing() -> list[Addressing]:
    """Give the blocks that nothing on this machine uses; hold ALLOCATION_LOCK from here until `create_bridge`.

    Clusters of killed test runs whose folders were cleaned away leave bridges that no `down` can find; they are deleted.
    """
    for mark in LINKS.glob("elastipod*/ifalias"):
        owner = mark.read_text().strip()
        if owner and not Path(owner).exists() and not any(tagged(Path(owner))):
            delete_link(mark.parent.name)
    links = {entry.name for entry in LINKS.iterdir()}
    used = [
        IPv4Network(route["dst"] if route["dst"] != "default" else "0.0.0.0/0", strict=False)
        for route in json.loads(run(["ip", "-json", "-4", "route", "show", "table", "all"]).stdout or "[]")
    ]
    return [Addressing.for_block(block) for block in free_blocks(used, links)]


def create_bridge(addressing: Addressing, owner: Path) -> None:
    """Make the cluster's bridge, marked with its owner's folder, and give the machine its address on it.

    A bridge without a hardware address of its own takes the lowest of its wires', which changes as nodes come and go:
    the others would send to the old one, and reach no API server, for half a minute.
    """
    bridge = addressing.kernel_name
    run(["ip", "link", "add", bridge, "address", addressing.hardware_address, "type", "bridge"])
    run(["ip", "link", "set", bridge, "alias", str(owner)])
    network = addressing.node_network
    run(["ip", "addr", "add", f"{addressing.api_address}/{network.prefixlen}", "dev", bridge])
    run(["ip", "link", "set", bridge, "up"])


def owns_bridge(addressing: Addressing, owner: Path) -> bool:
    """Tell whether the bridge is there and ours; hold ALLOCATION_LOCK.

    A bridge without a mark was left by a run that died between making and marking it: with the lock held, nobody else
    can be in that moment now.
    """
    try:
        mark = (LINKS / addressing.kernel_name / "ifalias").read_text().strip()
    except FileNotFoundError:
        return False
    return mark in ("", str(owner))


def delete_bridge(addressing: Addressing) -> None:
    """Delete the bridge and what wires are still plugged into it; their routes go with them."""
    bridge = addressing.kernel_name
    for wire in (LINKS / bridge / "brif").iterdir():
        delete_link(wire.name)
    delete_link(bridge)


def delete_link(name: str) -> None:
    """Delete a link unless it is already going, as the wire of a dead node is."""
    run(["ip", "link", "del", name], check=False)
    wait_until(lambda: not (LINKS / name).exists(), deadline_s=20, what=f"the link {name} to be gone")


def connect_node(addressing: Addressing, index: int, pid: int, others: list[int]) -> None:
    """Give the network namespace of process `pid` its wire, address and routes, and tell all others about its pods.

    index: number of the node; others: numbers of the nodes that exist. Each node routes pods of the others directly.
    """
    wire, address = addressing.link_name(index), addressing.node_address(index)
    delete_link(wire)
    run(["ip", "link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", str(pid)])
    run(["ip", "link", "set", wire, "master", addressing.kernel_name, "up"])
    commands = [
        "link set lo up",
        f"addr add {address}/{addressing.node_network.prefixlen} dev eth0",
        "link set eth0 up",
        *(_pod_route(addressing, other) for other in others if other != index),
        f"route add default via {addressing.api_address}",  # the node's process 1 waits for this one
    ]
    run(["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-"], input="\n".join(commands) + "\n")
    run(["ip", *_pod_route(addressing, index).split()])


def add_pod_route(addressing: Addressing, index: int, pid: int) -> None:
    """Teach the node with process `pid` the way to the pods of node `index`."""
    run(["nsenter", f"--net=/proc/{pid}/ns/net", "ip", *_pod_route(addressing, index).split()])


def _pod_route(addressing: Addressing, index: int) -> str:
    return f"route replace {addressing.pod_network(index)} via {addressing.node_address(index)}"


def set_link(addressing: Addressing, index: int, state: str) -> None:
    """Cut the wire to a node ("down") or mend it ("up"); one that was never plugged in has none."""
    wire = addressing.link_name(index)
    if (LINKS / wire).exists():
        run(["ip", "link", "set", wire, state])


def refusal(pid: int, address: IPv4Address | str, port: int) -> str:
    """Say why process `pid`'s network namespace cannot connect to an address; '' where it can."""
    tried = run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", sys.executable, "-c", _CONNECT, str(address), str(port)], check=False
    )
    return "" if tried.returncode == 0 else last_lines(tried.stderr, 1)
