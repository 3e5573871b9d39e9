"""Kueue in virtual time: its manager, which may be slow or away, and everybody's way to its objects.

The jobs of a sim compete for quota and not for nodes: each has a cluster of its own, and one Kueue serves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sim.kernel import Kernel, Script
from tests.sim.kueue import Kueue
from tests.sim.kueue_api import AWAY, Stream
from tests.sim.kueue_objects import LocalQueue
from tests.sim.kueue_workload import Workload
from tests.sim.quota_capacity import Allowance, ClusterQueue
from tests.sim.quota_invariants import QuotaInvariantChecker

from elastipod_operator.kube.api import ApiError

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

Body = dict[str, Any]

RESOURCE = "cpu"
FLAVORS = ("x", "y")
LABELS = {flavor: {"pool": flavor} for flavor in FLAVORS}
LOCAL_QUEUE = "training"
CLASS_PREFIX = "value-"


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """How the queues of a simulation are set up. quota: by ClusterQueue; those of several lend to each other."""

    quota: tuple[int, ...]
    flavors: int = 1
    strategy: str = "BestEffortFIFO"
    within: str = "LowerPriority"
    reclaim: str = "LowerPriority"
    borrow: str = "Never"
    pods_ready_s: int | None = None

    @property
    def are_recommended(self) -> bool:
        """Whether they are those of examples/kueue."""
        return self.within in ("Never", "LowerPriority") and self.reclaim in ("Never", "LowerPriority")

    def queues(self) -> list[ClusterQueue]:
        threshold = -900_000_000 if self.borrow != "Never" else None
        cohort = "all" if len(self.quota) > 1 else ""
        found = []
        for at, quota in enumerate(self.quota):
            first = quota if self.flavors == 1 else (quota + 1) // 2
            allowances = {("x", RESOURCE): Allowance(first)}
            if self.flavors > 1:
                allowances["y", RESOURCE] = Allowance(quota - first)
            found.append(
                ClusterQueue(
                    f"team-{at}", allowances, cohort, self.strategy, self.within, self.reclaim, self.borrow, threshold
                )
            )
        return found


class KueueServer:
    """One Kueue for all jobs of a simulation."""

    def __init__(self, kernel: Kernel, rng: Random, settings: QueueSettings, say: Callable[[str], None]) -> None:
        self.kernel = kernel
        self.rng = rng
        self.settings = settings
        self.say = say
        self.away_until = self.slow_until = self.lists_hang_until = 0.0
        self.hangs = False
        """Whether calls to it hang while it is away, or are refused at once."""
        self.tenants: dict[str, Tenant] = {}
        ready = settings.pods_ready_s
        timeout = timedelta(seconds=ready) if ready is not None else None
        self.watch = QuotaInvariantChecker(self)
        self.kueue = Kueue(kernel.utc, self._told, self.watch.evicts, timeout)
        self.kueue.labels.update(LABELS)
        for queue in settings.queues():
            self.kueue.add_queue(queue)
        self._is_due = False
        kernel.spawn(self._pulse())

    @property
    def is_away(self) -> bool:
        return self.kernel.now < self.away_until

    @property
    def is_at_rest(self) -> bool:
        """Whether it has nothing to do, and nobody has quota who is to give it back."""
        is_calm = not any(one.must_release_quota for one in self.kueue.workloads.values())
        partial_gangs = (name for name, tenant in self.tenants.items() if tenant.cluster is None)
        is_used = any(one.holds for name in partial_gangs for one in self.kueue.of(name))
        return is_calm and not (self._is_due or self.is_away or is_used)

    def tenant(self, name: str, queue: int, cluster: Cluster | None = None) -> Tenant:
        """Give somebody a LocalQueue."""
        self.kueue.local[name, LOCAL_QUEUE] = LocalQueue(f"team-{queue}")
        self.tenants[name] = Tenant(self, name, cluster)
        return self.tenants[name]

    def go_away(self, seconds: float, *, hangs: bool) -> None:
        """Its process is gone for a while, and all watches of its objects end."""
        self.away_until, self.hangs = self.kernel.now + seconds, hangs
        for tenant in self.tenants.values():
            tenant.end_streams()
        self.kernel.after(seconds, self._return)

    def _return(self) -> None:
        if not self.is_away:
            self.kueue.restart()
            self.kick()

    def heal(self) -> None:
        """End everything that goes on, and give the queues what they had."""
        self.slow_until = self.lists_hang_until = 0.0
        if self.is_away:
            self.away_until = self.kernel.now
            self.kueue.restart()
        for queue in self.settings.queues():
            for place, allowance in queue.allowances.items():
                self.kueue.set_allowance(queue.name, place, allowance)
            if self.kueue.queues[queue.name].stop != "None":
                self.kueue.set_stop(queue.name, "None")
        for (tenant, name), local in self.kueue.local.items():
            if local.stop != "None":
                self.kueue.set_local_stop(tenant, name, "None")
        for one in list(self.kueue.workloads.values()):
            if not one.is_active:
                self.kueue.set_active(one, True)
        self.kick()

    def kick(self) -> None:
        """Let the manager go on: something changed."""
        if not self._is_due:
            self._is_due = True
            is_slow = self.kernel.now < self.slow_until
            self.kernel.after(self.rng.uniform(0.5, 4.0) if is_slow else self.rng.uniform(0.001, 0.01), self._work)

    def _work(self) -> None:
        self._is_due = False
        if not self.is_away and self.kueue.work():
            self.kick()

    def _pulse(self) -> Script:
        while True:
            yield 1.0
            self.watch.look()
            if not self.is_away and self.kueue.tick():
                self.kick()

    def _told(self, one: Workload, change: str) -> None:
        self.tenants[one.tenant].told(one, change)
        self.kick()


class Tenant:
    """One job's namespace in Kueue. cluster: where its pods are; None for who is only modelled as an owner of quota."""

    def __init__(self, server: KueueServer, name: str, cluster: Cluster | None) -> None:
        self.server = server
        self.name = name
        self.cluster = cluster
        self.version = 0
        self.vanished_at: dict[str, float] = {}
        """When Workloads were taken away by others, by name."""
        self._streams: list[Stream] = []

    @property
    def workloads(self) -> list[Workload]:
        return self.server.kueue.of(self.name)

    def told(self, one: Workload, change: str) -> None:
        """An object is another one now."""
        self.version = one.version = self.cluster.bump() if self.cluster is not None else self.version + 1
        if self._streams:
            event = {"type": change, "object": one.body()}
            for stream in self._streams:
                stream.tell(event)

    def open(self) -> Stream:
        """Begin a watch."""
        stream = Stream(self)
        self._streams.append(stream)
        return stream

    def end_streams(self) -> None:
        """All watches end, and what was under way in them is lost."""
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.end()

    def close(self, stream: Stream) -> None:
        if stream in self._streams:
            self._streams.remove(stream)

    def collect(self) -> None:
        """The garbage collector takes the Workloads of a job that is gone."""
        if self.server.is_away:
            self.server.kernel.at(self.server.away_until + 1.0, self.collect)
            return
        for one in self.workloads:
            self.delete(one)

    def delete(self, one: Workload) -> None:
        self.server.watch.before_release(self, one, "deleted")
        self.server.kueue.delete(one)

    def one(self, name: str) -> Workload:
        """Give a Workload. Raises ApiError."""
        found = self.server.kueue.find(self.name, name)
        if found is None:
            raise ApiError(404, f'workloads.kueue.x-k8s.io "{name}" not found')
        return found

    # -- calls

    def serve(self, method: str, path: str, body: Any) -> Body:
        """Answer a call. Raises ApiError."""
        parts = path.strip("/").split("/")[3:]
        parts = parts[2:] if parts[0] == "namespaces" else parts
        kind, name, sub = (*parts, "", "")[:3]
        if kind == "resourceflavors":  # these are not converted
            return {"metadata": {"name": name}, "spec": {"nodeLabels": LABELS[name]}}
        if kind in ("workloadpriorityclasses", "priorityclasses"):
            return _class(name) if name else {"items": []}
        if self.server.is_away:
            raise ApiError(500, AWAY)
        if kind != "workloads":
            raise ApiError(404, f"the model has no {kind}")
        return self._status(name, body) if sub else self._workload(method, name, body)

    def _status(self, name: str, body: Any) -> Body:
        one = self.one(name)
        meta = body["metadata"]
        if meta.get("uid", one.uid) != one.uid:
            raise ApiError(409, "the UID in the precondition does not match")
        if "name" in meta:
            condition = body["status"]["conditions"][0]
            if condition["type"] == "Finished":
                self.server.watch.before_release(self, one, "finished")
            self.server.kueue.apply_condition(one, condition)
        else:
            wanted = {c["type"]: c["status"] for c in body["status"]["conditions"]}
            if str(meta["resourceVersion"]) == str(one.version) and wanted.get("QuotaReserved") == "False":
                self.server.watch.before_release(self, one, "released")
            self.server.kueue.merge_status(one, body)
        return one.body()

    def _workload(self, method: str, name: str, body: Any) -> Body:
        if method == "POST":
            made = self.server.kueue.create(self.name, body)
            self.server.watch.asked(self, made)
            return made.body()
        if not name:
            version = self.cluster.bump() if self.cluster is not None else self.version
            items = [one.body() for one in self.workloads]
            return {"items": items, "metadata": {"resourceVersion": str(version)}}
        one = self.one(name)
        if method == "GET":
            return one.body()
        if method == "PATCH":
            self.server.kueue.patch_spec(one, body["spec"])
            return one.body()
        if body["preconditions"]["uid"] != one.uid:
            raise ApiError(409, "the UID in the precondition does not match")
        self.delete(one)
        return {"kind": "Status"}


def _class(name: str) -> Body:
    """Every class named value-N exists and has the value N."""
    if not name.startswith(CLASS_PREFIX):
        raise ApiError(404, f'"{name}" not found')
    return {"metadata": {"name": name}, "value": int(name.removeprefix(CLASS_PREFIX))}


def priority_label(value: int) -> Mapping[str, str]:
    """Give the label of a job with a class of this value."""
    return {"kueue.x-k8s.io/priority-class": f"{CLASS_PREFIX}{value}"}
