"""The scenes that the simulator's model of Kueue is held against, on the real one (tests/sim/kueue_scenarios.py).

All scenes are played side by side, each in queues of its own: the first step of each, then the second of each, ...
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.api.kueue_objects import API, apply, let_a_second_pass, workload
from tests.objects import get_object, list_objects
from tests.patience import PATIENCE_S
from tests.sim.kueue_scenarios import (
    SCENARIOS,
    Activate,
    Ask,
    Drop,
    Finish,
    Operation,
    Queue,
    Release,
    Scenario,
    SetQuota,
    Step,
    Stop,
)

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until
from elastipod_operator.kube.workload_status import release_patch

Body = dict[str, Any]


class Stage:
    """One scene on a real Kueue. prefix: of its names."""

    def __init__(self, cluster: Cluster, namespace: str, prefix: str, scenario: Scenario) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self.prefix = prefix
        self.scenario = scenario

    def objects(self) -> list[Body]:
        """Give the flavors and queues."""
        flavors = {flavor for queue in self.scenario.queues for flavor in queue.quota}
        made = [
            {
                "apiVersion": API,
                "kind": "ResourceFlavor",
                "metadata": {"name": self.prefix + flavor},
                "spec": {"nodeLabels": {"pool": flavor}},
            }
            for flavor in flavors
        ]
        return [*made, *(body for queue in self.scenario.queues for body in self._queue(queue))]

    def _queue(self, queue: Queue) -> Iterable[Body]:
        preemption: Body = {"withinClusterQueue": queue.within, "reclaimWithinCohort": queue.reclaim}
        if queue.borrow != "Never":
            preemption["borrowWithinCohort"] = {"policy": queue.borrow, "maxPriorityThreshold": queue.threshold}
        name = self.prefix + queue.name
        spec: Body = {
            "namespaceSelector": {},
            "queueingStrategy": queue.strategy,
            "preemption": preemption,
            "resourceGroups": self._quota(queue, queue.quota),
        }
        if len(self.scenario.queues) > 1:
            spec["cohortName"] = f"{self.prefix}all"
        yield {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": spec}
        meta = {"name": name, "namespace": self._namespace}
        yield {"apiVersion": API, "kind": "LocalQueue", "metadata": meta, "spec": {"clusterQueue": name}}

    def _quota(self, queue: Queue, quota: Any) -> list[Body]:
        limits = {"borrowingLimit": queue.borrowing, "lendingLimit": queue.lending}
        set_limits = {key: value for key, value in limits.items() if value is not None}
        flavors = [
            {"name": self.prefix + flavor, "resources": [{"name": "cpu", "nominalQuota": cpu, **set_limits}]}
            for flavor, cpu in quota.items()
        ]
        return [{"coveredResources": ["cpu"], "flavors": flavors}]

    def asked(self, does: Ask) -> Body:
        """Give the Workload that is asked for."""
        body = workload(self.prefix + does.name, self._namespace, self.prefix + does.queue, count=does.count)
        body["spec"]["priority"] = does.priority
        if does.pool:
            body["spec"]["podSets"][0]["template"]["spec"]["nodeSelector"] = {"pool": does.pool}
        return body

    def do(self, does: Operation) -> None:
        """Do what is no question."""
        if isinstance(does, SetQuota):
            (queue,) = self.scenario.queues
            self._patch("clusterqueue", queue.name, {"spec": {"resourceGroups": self._quota(queue, {"x": does.cpu})}})
        elif isinstance(does, Stop):
            self._patch("clusterqueue", does.queue, {"spec": {"stopPolicy": does.policy}})
        elif isinstance(does, Activate):
            self._patch("workload", does.name, {"spec": {"active": does.active}})
        elif isinstance(does, Drop):
            self._kubectl("delete", "workload", self.prefix + does.name)
        elif isinstance(does, Finish):
            self._finish(does.name)
        elif isinstance(does, Release):
            wait_until(lambda: self._release(does.name), deadline_s=PATIENCE_S, what=f"{does.name} to be given back")

    def _patch(self, kind: str, name: str, patch: Body) -> None:
        self._kubectl("patch", kind, self.prefix + name, "--type=merge", "-p", json.dumps(patch))

    def _finish(self, name: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        finished = {
            "type": "Finished",
            "status": "True",
            "reason": "Succeeded",
            "message": "done",
            "lastTransitionTime": now,
        }
        meta = {"name": self.prefix + name, "namespace": self._namespace}
        body = {"apiVersion": API, "kind": "Workload", "metadata": meta, "status": {"conditions": [finished]}}
        args = ("apply", "--server-side", "--subresource=status", "--field-manager=finished", "-f", "-")
        self._kubectl(*args, input=json.dumps(body))

    def _release(self, name: str) -> bool:
        body = get_object(self._cluster, "workloads", self.prefix + name, self._namespace)
        patch = json.dumps(release_patch(body, datetime.now(UTC)))
        args = ("patch", "workload", self.prefix + name, "--subresource=status", "--type=merge", "-p", patch)
        return bool(self._kubectl(*args, check=False))

    def _kubectl(self, *args: str, **how: Any) -> str:
        return self._cluster.kubectl("-n", self._namespace, *args, **how)

    def seen(self, bodies: Iterable[Body]) -> dict[str, str]:
        """Give who holds quota, is to give it back, and waits, also behind others so that Kueue has not looked at it."""
        mine = {b["metadata"]["name"]: _state(b) for b in bodies if b["metadata"]["name"].startswith(self.prefix)}
        return {name.removeprefix(self.prefix): state for name, state in mine.items() if state != "finished"}


def _state(body: Body) -> str:
    states = {c["type"]: c["status"] for c in body.get("status", {}).get("conditions", [])}
    if states.get("Finished") == "True":
        return "finished"
    if states.get("QuotaReserved") != "True":
        return "pending"
    return "evicted" if states.get("Evicted") == "True" else "admitted"


@pytest.mark.long("churn")
def test_the_model_of_the_simulator_says_what_kueue_does(kueue_server: Cluster, kueue_namespace: str) -> None:
    run = kueue_namespace.removeprefix("test-")[:4]
    stages = {
        name: Stage(kueue_server, kueue_namespace, f"r{run}-{at:02d}-", scenario)
        for at, (name, scenario) in enumerate(SCENARIOS.items())
    }
    apply(kueue_server, *(body for stage in stages.values() for body in stage.objects()))
    queues = [stage.prefix + queue.name for stage in stages.values() for queue in stage.scenario.queues]
    deadline = f"--timeout={PATIENCE_S}s"
    kueue_server.kubectl("wait", deadline, "--for=condition=Active", *(f"clusterqueue/{name}" for name in queues))
    for at in range(max(len(stage.scenario.steps) for stage in stages.values())):
        now = {name: stage.scenario.steps[at] for name, stage in stages.items() if at < len(stage.scenario.steps)}
        asked = [stages[name].asked(step.does) for name, step in now.items() if isinstance(step.does, Ask)]
        if asked:
            apply(kueue_server, *asked)
        for name, step in now.items():
            stages[name].do(step.does)
        wanted = {name: step.seen() for name, step in now.items()}
        wait_until_seen(kueue_server, kueue_namespace, stages, wanted, now)
        let_a_second_pass()
        assert look(kueue_server, kueue_namespace, stages, wanted) == wanted, "and stays so"


def look(
    cluster: Cluster, namespace: str, stages: dict[str, Stage], wanted: dict[str, dict[str, str]]
) -> dict[str, dict[str, str]]:
    """Give what is seen of each scene that goes on."""
    bodies = list_objects(cluster, "workloads", namespace)
    return {name: stages[name].seen(bodies) for name in wanted}


def wait_until_seen(
    cluster: Cluster,
    namespace: str,
    stages: dict[str, Stage],
    wanted: dict[str, dict[str, str]],
    steps: dict[str, Step],
) -> None:
    """Wait until each scene is as it should be; fails with those that are not."""
    until = time.monotonic() + PATIENCE_S
    while (seen := look(cluster, namespace, stages, wanted)) != wanted:
        if time.monotonic() > until:
            wrong = [
                f"{name}, {steps[name].does}: {seen[name]} instead of {wanted[name]}"
                for name in wanted
                if seen[name] != wanted[name]
            ]
            raise AssertionError("\n".join(wrong))
        time.sleep(0.1)
