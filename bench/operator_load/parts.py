"""What is measured: starts of many agents, creations of many pods, and a fleet of jobs at rest and in motion."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from bench.common.machine import busy_meter
from bench.common.processes import Failed
from bench.common.samples import Samples, quantile
from bench.operator_load.api import ApiClient
from bench.operator_load.bare import POD_ORDERS, WHOLE, Taken, bare_writes
from bench.operator_load.cluster import count_by_kind
from bench.operator_load.jobs import BATCH_JOBS, JOBS, PODS, bare_pod, batch_job, job
from bench.operator_load.load import API_WRITE, DECISION, POD_ORDER, RECONCILE, Load

from elastipod_operator.core.names import ANNOTATION_STATE, LABEL_JOB

Event = Callable[[Load, str, int, int], Coroutine[None, None, None]]
OURS, BARE, OTHER, JOB_CONTROLLER = "operator", "bare loop", "another client", "Job controller"
PER_POD_S = 0.1  # time per pod after which a wait is given up
IDLE_S, SETTLE_S = 60.0, 15.0
ONCE = frozenset({"fleet"})  # parts that measure once and are repeated from an empty control plane
QUIET_CALLS = frozenset({"get leases", "update leases"})


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything. churn: events a second; churn_s: for how long."""

    starts: tuple[int, ...]
    restart: int
    jobs: int
    pods: int
    repeat: int
    churn: float
    churn_s: float = 60.0


def _patience(pods: int) -> float:
    return 60 + pods * PER_POD_S


async def starts(it: Load, sizes: Sizes, samples: Samples) -> None:
    """Agents that become READY all at once: until the last of them was told its rank; and a restart in place."""
    for count, number in itertools.product(sizes.starts, range(sizes.repeat)):
        name = f"start-{count}-{number}"
        await it.control("POST", "/hold")
        await it.create(job(name, count, "node-0", it.agent_port))
        await it.until(f"{count} agents to wait", _is_counted(it, name, "init", count), _patience(count))
        await it.until(f"{count} agents to be watched", _is_watched(it, name, count), _patience(count))
        await asyncio.sleep(2)  # the operator is at rest
        before = await it.usage()
        released = (await it.control("POST", "/release"))["at"]
        seen = await it.until_trains(name, count, _patience(count))
        samples.add(OURS, f"start of {count} agents", _last_start(seen, 1, count) - released)
        samples.add(OURS, f"start of {count} agents, processor", (await it.usage()).cpu_s - before.cpu_s)
        body = await _settled(it, name)
        samples.add(OURS, f"job object at {count} pods", await it.api.size_of(f"{JOBS}/{name}") / 1024)
        samples.add(OURS, f"record at {count} pods", len(body["metadata"]["annotations"][ANNOTATION_STATE]) / 1024)
        crashed = (await it.control("POST", f"/crash?job={name}"))["at"]
        await it.until(f"the restart of {name}", _is_started(it, name, 2, count), _patience(count))
        seen = await it.until_trains(name, count, _patience(count))
        samples.add(OURS, f"restart of {count} agents in place", _last_start(seen, 2, count) - crashed)
        await it.delete(name, _patience(count))


def _is_counted(it: Load, name: str, state: str, count: int) -> Any:
    async def holds() -> bool:
        seen = await it.about(name)
        return bool(seen["states"].get(state, 0) == count)

    return holds


def _is_watched(it: Load, name: str, count: int) -> Any:
    async def holds() -> bool:
        return bool((await it.about(name))["polled"] == count)

    return holds


def _is_started(it: Load, name: str, generation: int, count: int) -> Any:
    async def holds() -> bool:
        seen = await it.about(name)
        return bool(seen["starts"].get(str(generation), {}).get("count", 0) == count)

    return holds


def _last_start(seen: Mapping[str, Any], generation: int, count: int) -> float:
    """Give when the last agent was started. Raises Failed where ranks were given twice or not at all."""
    start = seen["starts"].get(str(generation), {})
    if start.get("ranks") != count or start.get("count") != count:
        raise Failed(f"{count} agents were to get {count} ranks in generation {generation}, but: {seen['starts']}")
    return float(start["last"])


async def _settled(it: Load, name: str) -> dict[str, Any]:
    """Wait until the operator says that a job trains."""

    async def trains() -> dict[str, Any] | None:
        body = await it.api.call("GET", f"{JOBS}/{name}")
        conditions = (body.get("status") or {}).get("conditions") or [{}]
        return body if conditions[-1].get("reason") == "Training" else None

    return await it.until(f"{name} to be said to train", trains, 60, every_s=0.2)


async def creations(it: Load, sizes: Sizes, samples: Samples) -> None:
    """Pods made by the operator, a bare loop and the Job controller in turn, and all pods of a job recreated after a fault.

    Operator and loop make the same pods with 16 calls at once, on the same API server, as the same user; the same watch counts.
    """
    count = sizes.restart
    operator_config = it.cluster.kubeconfig_of("elastipod-operator")
    recreate = {"runPolicy": {"restartPolicy": {"numRestartBeforeFullJobRestart": 0}}}
    async with ApiClient(operator_config, parallel=16) as bare:
        for number in range(sizes.repeat):
            name = f"create-{number}"
            await it.create(job(name, count, "node-1", it.agent_port, **recreate))
            seen = await it.until_trains(name, count, _patience(count))
            samples.add(OURS, "pods created", _rate(seen))
            listed = await it.api.call("GET", f"{PODS}?labelSelector={LABEL_JOB}%3D{name}&limit=1")
            like = listed["items"][0]
            await _settled(it, name)
            began = (await it.control("POST", f"/crash?job={name}"))["at"]
            await it.until(f"{name} to be recreated", _is_started(it, name, 2, count), 2 * _patience(count))
            seen = await it.until_trains(name, count, _patience(count))
            samples.add(OURS, "all pods recreated", seen["last_ran"] - began)
            await it.delete(name, _patience(count))
            await _bare(it, bare, like, f"bare-{number}", count, samples)
            try:
                await _job_controller(it, like, f"batch-{number}", count, samples)
            except Failed as error:  # a peer that fails takes no figure of ours with it
                for metric in ("pods created", "all pods recreated"):
                    samples.fail(JOB_CONTROLLER, metric, str(error))


async def _bare(it: Load, bare: ApiClient, like: Mapping[str, Any], group: str, count: int, samples: Samples) -> None:
    await _create_bare(bare, like, group, range(count))
    await it.until(f"{count} bare pods to run", _is_running(it, group, count), _patience(count))
    samples.add(BARE, "pods created", _rate(await it.about(group)))
    began = time.monotonic()
    # Rights to delete are those of the operator; who deletes by a selector would be quicker than anybody may be.
    await bare.all_of(*(("DELETE", f"{PODS}/{group}-{n}", None) for n in range(count)))
    await _create_bare(bare, like, group, range(count, 2 * count))
    await it.until(f"{count} new bare pods to run", _is_running(it, group, count), _patience(count))
    samples.add(BARE, "all pods recreated", (await it.about(group))["last_ran"] - began)
    await bare.all_of(*(("DELETE", f"{PODS}/{group}-{n}", None) for n in range(count, 2 * count)))


async def _job_controller(it: Load, like: Mapping[str, Any], name: str, count: int, samples: Samples) -> None:
    """Have a Job make the same pods, and restart it as JobSet does: delete it with all its pods, then create it again."""
    for attempt in range(2):
        began, attempted = time.monotonic(), f"{name}-{attempt}"
        if attempt:
            await _delete_batch_job(it, f"{name}-0", count)
        await it.api.call("POST", BATCH_JOBS, batch_job(like, attempted, count))
        await it.until(f"{count} pods of {attempted} to run", _is_running(it, attempted, count), 2 * _patience(count))
        seen = await it.about(attempted)
        if attempt:
            samples.add(JOB_CONTROLLER, "all pods recreated", seen["last_ran"] - began)
        else:
            samples.add(JOB_CONTROLLER, "pods created", _rate(seen))
    await _delete_batch_job(it, f"{name}-1", count)


async def _delete_batch_job(it: Load, name: str, count: int) -> None:
    await it.api.call("DELETE", f"{BATCH_JOBS}/{name}?propagationPolicy=Foreground")

    async def is_gone() -> bool:
        return await it.api.call("GET", f"{BATCH_JOBS}/{name}", fine=(404,)) == {}

    await it.until(f"the Job {name} and its pods to be gone", is_gone, 2 * _patience(count))


async def _create_bare(bare: ApiClient, like: Mapping[str, Any], group: str, numbers: range) -> None:
    await bare.all_of(*(("POST", PODS, bare_pod(like, group, f"{group}-{n}")) for n in numbers))


def _is_running(it: Load, group: str, count: int) -> Any:
    async def holds() -> bool:
        seen = await it.about(group)
        return bool(seen["ran"] == seen["pods"] == count)

    return holds


def _rate(seen: Mapping[str, Any]) -> float:
    return float((seen["pods"] - 1) / (seen["last_added"] - seen["first_added"]))


async def fleet(it: Load, sizes: Sizes, samples: Samples) -> None:
    """Many jobs: how long until all train, what the operator costs at rest, and in motion; one run."""
    each = sizes.pods // sizes.jobs
    names = [f"fleet-{n}" for n in range(sizes.jobs)]
    began, before = time.monotonic(), await it.usage()
    await it.api.all_of(*(("POST", JOBS, _elastic(name, each, n, it.agent_port)) for n, name in enumerate(names)))
    await it.until_trains("", sizes.pods, 300 + _patience(sizes.pods))
    samples.add(OURS, "fleet trains", time.monotonic() - began)
    after = await it.usage()
    samples.add(OURS, "fleet trains, processor", after.cpu_s - before.cpu_s)
    samples.add(OURS, "fleet trains, pass without pods p99", it.times(before, after).quantile_ms(RECONCILE, 0.99))
    await asyncio.sleep(SETTLE_S)
    await _rest(it, samples)
    like = await it.api.call("GET", f"{JOBS}/{names[0]}")
    pod = (await it.api.call("GET", f"{PODS}?labelSelector={LABEL_JOB}%3D{names[0]}&limit=1"))["items"][0]
    async with bare_writes(it.cluster.kubeconfig, like, pod, each) as taken:
        await _motion(it, sizes, names, each, samples, taken)
    await it.until_trains("", sizes.pods, _patience(sizes.pods))
    await asyncio.sleep(SETTLE_S)
    samples.add(OURS, "memory after motion", (await it.usage()).rss_mib)


def _elastic(name: str, pods: int, number: int, agent_port: int) -> dict[str, Any]:
    policy = {"minReplicas": max(1, pods // 2), "maxReplicas": pods, "scalingTimeoutInSeconds": 1}
    return job(
        name, pods, f"node-{2 + number % 50}", agent_port,
        elasticPolicy={**policy, "gracefulShutdownTimeoutInSeconds": 30},
    )  # fmt: skip


async def _rest(it: Load, samples: Samples) -> None:
    offset, before = it.cluster.audit_log.stat().st_size, await it.usage()
    asked = (await it.about())["requests"].get("/status", 0)
    await asyncio.sleep(IDLE_S)
    after = await it.usage()
    asked = (await it.about())["requests"].get("/status", 0) - asked
    lasted = after.at - before.at
    samples.add(OURS, "idle processor", 100 * (after.cpu_s - before.cpu_s) / lasted)
    samples.add(OURS, "idle memory", after.rss_mib)
    samples.add(OURS, "idle heartbeats", asked / lasted)
    samples.add(OURS, "idle passes", it.times(before, after).count(RECONCILE) / lasted)
    await asyncio.sleep(0.5)  # the audit log is written in batches
    counts = count_by_kind(it.cluster.calls(offset))
    samples.add(OURS, "idle calls, leases", sum(counts[what] for what in QUIET_CALLS) / lasted)
    others = {what: count for what, count in counts.items() if what not in QUIET_CALLS}
    samples.add(OURS, "idle calls, others", sum(others.values()))
    if others:
        samples.fail(OURS, "idle calls, others", f"{others}")


async def _motion(it: Load, sizes: Sizes, names: list[str], each: int, samples: Samples, taken: Taken) -> None:
    """Crashes, resizes in both directions, and jobs that end and come, in turn, of one job after the other."""
    before, offset, busy = await it.usage(), it.cluster.audit_log.stat().st_size, busy_meter()
    tasks: list[asyncio.Task[str]] = []
    kinds = itertools.cycle((_crash, _resize, _replace))
    free = deque(range(len(names)))
    end = time.monotonic() + sizes.churn_s
    due = time.monotonic()
    while time.monotonic() < end:
        if not free:
            raise Failed(f"all {len(names)} jobs are busy; {sizes.churn:g} events a second are too many for them")
        number = free.popleft()
        tasks.append(asyncio.create_task(_event(next(kinds), it, names[number], each, number, free)))
        due += 1 / sizes.churn
        await asyncio.sleep(max(0, due - time.monotonic()))
    after, bare = await it.usage(), {kind: list(times) for kind, times in taken.items()}
    if not all(bare.values()):
        raise Failed("the other client wrote nothing")
    samples.add(OURS, "churn machine", 100 * busy())
    failures = [why for why in await asyncio.gather(*tasks) if why]
    samples.add(OURS, "churn events in vain", len(failures))
    for why in failures:
        samples.fail(OURS, "churn events in vain", why)
    lasted, ours = after.at - before.at, it.times(before, after)
    samples.add(OURS, "churn processor", 100 * (after.cpu_s - before.cpu_s) / lasted)
    samples.add(OURS, "churn events", len(tasks) / lasted)
    samples.add(OURS, "churn passes", ours.count(RECONCILE) / lasted)
    passes, ordered = bare.pop(WHOLE), bare.pop(POD_ORDERS)
    samples.add(OURS, "churn decision p99", ours.quantile_ms(DECISION, 0.99))
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        samples.add(OURS, f"churn pass without pods {name}", ours.quantile_ms(RECONCILE, share))
        samples.add(OTHER, f"churn pass without pods {name}", 1000 * quantile(passes, share))
        samples.add(OURS, f"churn pod {name}", ours.quantile_ms(POD_ORDER, share))
        samples.add(OTHER, f"churn pod {name}", 1000 * quantile(ordered, share))
        samples.add(OURS, f"churn write {name}", ours.quantile_ms(API_WRITE, share))
        samples.add(OTHER, f"churn write {name}", 1000 * quantile([t for times in bare.values() for t in times], share))
        for kind, times in bare.items():
            samples.add(OURS, f"churn {kind} {name}", ours.quantile_ms(f"{API_WRITE} {kind}", share))
            samples.add(OTHER, f"churn {kind} {name}", 1000 * quantile(times, share))
    samples.add(OURS, "churn memory", after.rss_mib)
    calls = it.cluster.calls(offset)
    samples.add(OURS, "churn calls", len(calls) / lasted)


async def _event(kind: Event, it: Load, name: str, each: int, number: int, free: deque[int]) -> str:
    """Let something happen to a job and wait until all is well again; gives why it did not come to that."""
    try:
        await kind(it, name, each, number)
    except Failed as error:
        return f"{kind.__name__}: {error}"
    free.append(number)
    return ""


async def _crash(it: Load, name: str, each: int, number: int) -> None:
    await it.control("POST", f"/crash?job={name}")
    await asyncio.sleep(1)
    await it.until_trains(name, each, 60)


async def _resize(it: Load, name: str, each: int, number: int) -> None:
    low = max(1, each // 2)
    await it.api.call("PATCH", f"{JOBS}/{name}", {"spec": {"replicas": low}})
    await asyncio.sleep(2)
    await it.until_trains(name, low, 60)
    await it.api.call("PATCH", f"{JOBS}/{name}", {"spec": {"replicas": 0}})
    await asyncio.sleep(2)
    await it.until_trains(name, each, 90)


async def _replace(it: Load, name: str, each: int, number: int) -> None:
    await it.delete(name, 60)

    async def is_forgotten() -> bool:
        return await it.api.call("GET", f"{JOBS}/{name}", fine=(404,)) == {}

    await it.until(f"job {name} to be gone", is_forgotten, 60)
    await it.create(_elastic(name, each, number, it.agent_port))
    await it.until_trains(name, each, 60)
