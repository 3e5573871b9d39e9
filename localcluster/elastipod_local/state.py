"""The recorded state of a cluster, always written before anything is created, so that any later run can clean up."""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from ipaddress import IPv4Address
from pathlib import Path
from typing import IO

from elastipod_local.addressing import Addressing
from elastipod_local.errors import LocalClusterError
from elastipod_local.host import Progress, Reminder, quiet
from elastipod_local.kueue_config import KueueOptions
from elastipod_local.processes import ProcessId

FORMAT = 1
LOCK_POLL_S = 0.05
TELL_AFTER_S = 2.0  # of a wait for a lock, and then every
TELL_EVERY_S = 30.0
BUILD_WAIT_S = 3600  # for another process that builds what we need as well


class Phase(StrEnum):
    STARTING = "starting"
    UP = "up"
    STOPPING = "stopping"


class NodePhase(StrEnum):
    STARTING = "starting"
    UP = "up"
    OFF = "off"  # power loss: nothing runs, its disk is kept
    FROZEN = "frozen"
    PARTITIONED = "partitioned"
    REMOVING = "removing"


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node. `outer` is the process that made its namespaces; `inner` is process 1 inside, None until seen."""

    index: int
    phase: NodePhase
    outer: ProcessId | None = None
    inner: ProcessId | None = None


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What every node of the cluster offers.

    cpus, memory_mib: allocatable for pods, None for all that the machine has; slots: units of elastipod.io/slot.
    """

    cpus: float | None = None
    memory_mib: int | None = None
    slots: int = 1


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The recorded state of a cluster."""

    name: str
    phase: Phase
    addressing: Addressing
    options: NodeOptions = NodeOptions()
    images: str = ""  # key of the image set that new nodes start from
    control_plane: dict[str, ProcessId] = field(default_factory=dict)
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    kueue: KueueOptions | None = None  # None: the cluster has no Kueue

    def with_node(self, name: str, record: NodeRecord | None) -> "ClusterState":
        """Give the state with this node's record in place, or without the node for None."""
        nodes = {key: value for key, value in self.nodes.items() if key != name}
        return replace(self, nodes=nodes if record is None else {**nodes, name: record})

    def with_process(self, role: str, process: ProcessId) -> "ClusterState":
        """Give the state with this process of the control plane."""
        return replace(self, control_plane={**self.control_plane, role: process})


class StateFile:
    """`state.json` of a cluster's folder, and the lock that lets one process at a time work on the cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "state.json"

    def load(self) -> ClusterState | None:
        """Give what is written, None when there is no cluster. Raises LocalClusterError when it cannot be read."""
        try:
            return decode(self.path.read_text())
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as broken:
            raise LocalClusterError(
                f"{self.path} cannot be read ({broken}); was it written by another version? "
                "End the cluster with that version, or delete the file once none of its processes runs"
            ) from broken

    def read(self) -> ClusterState:
        """Give what is written of a cluster that was up just now. Raises LocalClusterError when it is gone."""
        state = self.load()
        if state is None:
            raise LocalClusterError(f"{self.path} is gone; was the cluster taken down meanwhile?")
        return state

    def save(self, state: ClusterState) -> None:
        """Replace the file whole; it is on disk when this returns."""
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".new")
        with draft.open("w") as stream:
            stream.write(encode(state))
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(self.path)

    def update(self, change: Callable[[ClusterState], ClusterState]) -> ClusterState:
        """Read, change and write the state and give the new one. Hold the cluster's lock."""
        changed = change(self.read())
        self.save(changed)
        return changed

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    @contextmanager
    def locked(self, *, wait_s: float = 0, progress: Progress = quiet) -> Iterator[None]:
        """Hold the cluster's lock. Raises LocalClusterError when another holds it and keeps it longer than wait_s."""
        with exclusive(self.folder / "lock", wait_s=wait_s, progress=progress):
            yield


@contextmanager
def exclusive(path: Path, *, wait_s: float, progress: Progress = quiet) -> Iterator[None]:
    """Hold a lock file; the kernel lets go of it when the process dies, whatever it dies of.

    Raises LocalClusterError naming the holder when another keeps it longer than wait_s; progress hears of a long wait before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + wait_s
    reminder = Reminder(progress, first_s=TELL_AFTER_S, every_s=TELL_EVERY_S)
    # For its owner alone: any user who could open it could hold it. And no link may have us write somewhere else.
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(number, "r+") as stream:
        while not _try_lock(stream):
            holder = f"another elastipod process (pid {_read_again(stream) or 'unknown'})"
            if time.monotonic() > end:
                raise LocalClusterError(f"{holder} is working on {path.parent}; wait for it or end it first")
            reminder.remind(f"  waiting for {holder} that works on {path.parent}")
            time.sleep(LOCK_POLL_S)
        stream.seek(0)
        stream.truncate()
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield


def _try_lock(stream: IO[str]) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_again(stream: IO[str]) -> str:
    stream.seek(0)
    return stream.read().strip()


def encode(state: ClusterState) -> str:
    """Give the state as JSON."""
    record = {"format": FORMAT, **asdict(state)}
    record["addressing"] = {"block": state.addressing.block, "loopback": str(state.addressing.loopback)}
    return json.dumps(record, indent=1) + "\n"


def decode(text: str) -> ClusterState:
    """Read what `encode` wrote. Raises ValueError, KeyError or TypeError for anything else."""
    record = json.loads(text)
    if record["format"] != FORMAT:
        raise ValueError(f"format {record['format']}, expected {FORMAT}")
    return ClusterState(
        name=record["name"],
        phase=Phase(record["phase"]),
        addressing=Addressing(record["addressing"]["block"], IPv4Address(record["addressing"]["loopback"])),
        options=NodeOptions(**record["options"]),
        images=record["images"],
        control_plane={role: ProcessId(**process) for role, process in record["control_plane"].items()},
        nodes={name: _decode_node(node) for name, node in record["nodes"].items()},
        kueue=KueueOptions.from_record(record["kueue"]) if record.get("kueue") else None,
    )


def _decode_node(node: dict[str, object]) -> NodeRecord:
    def process(key: str) -> ProcessId | None:
        value = node[key]
        return ProcessId(**value) if isinstance(value, dict) else None

    index = node["index"]
    if not isinstance(index, int):
        raise ValueError(f"node index {index!r} is no number")
    return NodeRecord(index, NodePhase(str(node["phase"])), process("outer"), process("inner"))
