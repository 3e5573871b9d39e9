"""Objects and answers of every shape, through all that reads them and decides on them: nothing raises, nothing takes long."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Any

import psutil
import pytest
from tests.long_runs import LongRun
from tests.unit.kube.random_clusters import JOB_UID, NOW, World, odd_world, sound_world

from elastipod_operator.agents.command_builder import CommandBuilder
from elastipod_operator.agents.commands import Command
from elastipod_operator.agents.polled_agent import Address
from elastipod_operator.agents.status import InvalidStatus, parse_status
from elastipod_operator.agents.status_cache import AgentStatusCache
from elastipod_operator.core.actions import CreatePod, CreateWorkload, Plan
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record_codec import decode, encode
from elastipod_operator.core.snapshot import ObservedAgent, Snapshot
from elastipod_operator.kube.api import as_yaml
from elastipod_operator.kube.applied import effective_spec
from elastipod_operator.kube.changes import metadata_changes, status_change
from elastipod_operator.kube.cluster_queues import QueueTable
from elastipod_operator.kube.placement import PlacementError, flavors_of, placement
from elastipod_operator.kube.pods import pod_manifest
from elastipod_operator.kube.store import Job, Store
from elastipod_operator.kube.workloads import Priority, base_priority_source, own_priority_source, workload_manifest
from elastipod_operator.queueing.queue_snapshot import workloads_of

Body = dict[str, Any]
QUICK, LONG = 250, 10_000
# A decision about a sound world takes some 3 ms. What is large is bounded, not free: 1 MiB of text, sizes up to the limit.
LIMIT_S, LIMIT_BYTES = 5.0, 256 << 20


class Operator:
    """The parts of the shell that read and write objects, without any I/O."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.store = Store(lambda: NOW)
        self.agents: dict[str, ObservedAgent] = {}
        self.progress: dict[str, Any] = {}

    def see(self) -> Job | None:
        """Take everything in, in the order of a list and then of events."""
        world, store = self._world, self.store
        for node in world.nodes:
            store.put_node(node)
        store.put_job(world.job)
        job = store.jobs.get(JOB_UID)
        if job is None:
            return None
        store.replace_pods(JOB_UID, world.pods, 100)
        for pod in world.pods:
            store.put_pod(pod)
        store.replace_workloads(JOB_UID, world.workloads, 100)
        store.replace_all_workloads("", world.workloads, 101)
        for workload in world.workloads:
            store.put_workload(workload)
        for name, answer in world.answers.items():
            try:
                found = parse_status(answer, ObservedAgent(trying_since=NOW), NOW)
            except InvalidStatus:
                self.agents[name] = ObservedAgent(trying_since=NOW)
                continue
            self.agents[name], self.progress[name] = found.fact, found.progress
        return job

    def _queues(self, kind: str) -> list[Body]:
        """Give what a list of the API server holds: objects, whatever is in them."""
        found = self._world.queues.get(kind)
        return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []

    def observed(self, job: Job) -> Snapshot:
        local, cluster = (self._queues(kind) for kind in ("local", "cluster"))
        table = QueueTable(local, cluster)
        pods = tuple(job.pods.values())
        return Snapshot(
            now=NOW, job=job.fact, pods=pods, nodes=self.store.nodes_of(job),
            agents={p.name: self.agents.get(p.name, ObservedAgent()) for p in pods}, pods_listed_at=job.pods_listed_at,
            workloads=workloads_of(job), default_queue=False,
            queue_fact=table.fact("team", "gpus"),
        )  # fmt: skip

    def carry_out(self, job: Job, todo: Plan) -> None:
        """Write out all that a plan has written."""
        metadata, status = metadata_changes(job, todo), status_change(job, todo)
        json.dumps(metadata).encode()
        if status is not None:
            as_yaml({"status": status}).encode()
        written = encode(todo.record)
        assert encode(decode(written)) == written
        if job.fact.policy is None:
            return
        spec = effective_spec(job.body)
        for action in [a for a in todo.actions if isinstance(a, CreatePod)][:5]:
            self._create(job, spec, action)
        for ask in (a for a in todo.actions if isinstance(a, CreateWorkload)):
            base_priority_source(job.body, spec), own_priority_source(spec, ask)
            json.dumps(workload_manifest(job.fact, spec, ask, Priority(0))).encode()
        board = AgentStatusCache(None, lambda _: None)  # type: ignore[arg-type]  # no agent is asked
        orders = CommandBuilder(
            spec, {p.name: p for p in job.pods.values()}, todo.record, board, lambda p: Address(JOB_UID, p.ip, 1)
        )
        for command in filter(None, map(orders.build, todo.actions)):
            assert isinstance(command, Command)
            json.dumps(command.body).encode()

    def _create(self, job: Job, spec: Mapping[str, Any], action: CreatePod) -> None:
        assert job.fact.policy is not None
        placed = None
        if action.workload:
            template = next(s for s in spec["replicaSpecs"] if s["name"] == action.pod.spec)["template"]
            body = self._world.workloads[0]
            try:
                placed = placement(
                    body,
                    action.pod.spec,
                    template,
                    dict.fromkeys(flavors_of(body), next(iter(self._queues("flavors")), {})),
                )
            except PlacementError:
                return
        manifest = pod_manifest(
            job.fact, spec, job.fact.policy, action.pod, action.nnodes, "secret", generation=1, avoids=("node-1",), placed=placed
        )  # fmt: skip
        json.dumps(manifest).encode()


def outcome(world: World) -> str:
    """Have a job decided about, what comes of it written, and decided about again; gives how it was taken."""
    operator = Operator(world)
    job = operator.see()
    if job is None:
        return "ignored"
    assert (job.fact.policy is None) == bool(job.fact.spec_error)
    todo = plan(operator.observed(job))
    assert todo.conditions
    operator.carry_out(job, todo)
    after = dict(world.job)
    metadata = metadata_changes(job, todo)
    meta = {**world.job["metadata"], **metadata, "resourceVersion": "1000"}
    if "annotations" in metadata:
        known = world.job["metadata"].get("annotations")
        meta["annotations"] = {**(known if isinstance(known, dict) else {}), **metadata["annotations"]}
    after["metadata"] = meta
    status = status_change(job, todo)
    operator.store.put_job(after if status is None else {**after, "status": status})
    again = plan(operator.observed(job))
    operator.carry_out(job, again)
    assert again.record.generation >= todo.record.generation
    if job.fact.unmanaged:
        return "left alone"
    return "edit refused" if job.fact.edit_error else "refused" if job.fact.policy is None else "decided"


def run(seeds: range, *, trace: bool = False) -> tuple[Counter[str], float, int]:
    """Go through worlds; gives how they were taken, the longest time of one (of this process), and the most memory of one."""
    taken: Counter[str] = Counter()
    slowest, largest = 0.0, 0
    for seed in seeds:
        world = odd_world(seed)
        if trace:
            tracemalloc.start()
        began = time.process_time()
        try:
            taken[outcome(world)] += 1
        except Exception as error:
            raise AssertionError(f"world {seed}: {type(error).__name__}: {error}"[:500]) from error
        finally:
            spent = time.process_time() - began
            if trace:
                largest = max(largest, tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
        slowest = max(slowest, spent)
    return taken, slowest, largest


def test_a_sound_world_is_decided_about() -> None:
    assert {outcome(sound_world(Random(seed))) for seed in range(20)} == {"decided"}


@pytest.mark.slow
def test_objects_of_any_shape_are_decided_about(seed: int) -> None:
    taken, _, _ = run(range(seed, seed + QUICK))
    assert taken["decided"] > QUICK / 4
    assert taken["refused"] + taken["edit refused"] > QUICK / 20


@pytest.mark.long("fuzz")
@pytest.mark.timeout(3600)
def test_ten_thousand_objects_of_any_shape_are_decided_about(seed: int, long_run: LongRun) -> None:
    run(range(seed, seed + QUICK))  # what is loaded and cached once is there before memory is compared
    process = psutil.Process()
    before = process.memory_info().rss
    taken, slowest, _ = run(range(seed, seed + LONG))
    grown = process.memory_info().rss - before
    # Every tenth with its memory traced, which takes several times as long.
    _, _, largest = run(range(seed, seed + LONG, 10), trace=True)
    kinds = {how.replace(" ", "_"): number for how, number in taken.items()}
    long_run.count(
        worlds=LONG, slowest_s=round(slowest, 3), largest_mib=round(largest / 2**20, 1),
        grown_mib=round(grown / 2**20, 1), **kinds,
    )  # fmt: skip
    assert slowest < LIMIT_S
    assert largest < LIMIT_BYTES
    assert grown < LIMIT_BYTES, "what is kept of worlds that are gone has no bound"
