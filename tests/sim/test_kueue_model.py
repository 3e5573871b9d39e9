"""The model of Kueue says what the real one does: tests/api/test_kueue_replay.py runs the same scenarios there."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.nonempty import some
from tests.sim.kernel import EPOCH
from tests.sim.kueue import Kueue
from tests.sim.kueue_objects import LocalQueue
from tests.sim.kueue_scenarios import (
    MORE,
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
)  # fmt: skip
from tests.sim.kueue_workload import Workload
from tests.sim.quota_capacity import Allowance, ClusterQueue

from elastipod_operator.kube.api import ApiError
from elastipod_operator.kube.workload_status import release_patch

TENANT = "team"


class Model:
    """The scenes on the model: a second passes between two steps."""

    def __init__(self, scenario: Scenario) -> None:
        self.now = EPOCH
        self.kueue = Kueue(lambda: self.now)
        for queue in scenario.queues:
            self._add(queue, "cohort" if len(scenario.queues) > 1 else "")

    def _add(self, queue: Queue, cohort: str) -> None:
        allowances = {(f, "cpu"): Allowance(n, queue.borrowing, queue.lending) for f, n in queue.quota.items()}
        self.kueue.labels.update({flavor: {"pool": flavor} for flavor in queue.quota})
        self.kueue.local[TENANT, queue.name] = LocalQueue(queue.name)
        self.kueue.add_queue(
            ClusterQueue(
                queue.name,
                allowances,
                cohort,
                queue.strategy,
                queue.within,
                queue.reclaim,
                queue.borrow,
                queue.threshold,
            )
        )

    def sim(self, step: Step) -> dict[str, str]:
        """Do it; give who has quota at rest."""
        self.now += timedelta(seconds=2)
        self._do(step.does)
        self.kueue.settle()
        self.kueue.tick()
        self.kueue.settle()
        return {one.name: _state(one) for one in self.kueue.workloads.values() if not one.has("Finished")}

    def _do(self, does: Operation) -> None:
        if isinstance(does, Ask):
            self.kueue.create(TENANT, manifest(does))
        elif isinstance(does, SetQuota):
            queue = self.kueue.queues[does.queue]
            place = next(iter(queue.allowances))
            self.kueue.set_allowance(does.queue, place, Allowance(does.cpu))
        elif isinstance(does, Stop):
            self.kueue.set_stop(does.queue, does.policy)
        else:
            one = self.kueue.find(TENANT, does.name)
            assert one is not None
            self._do_to(one, does)

    def _do_to(self, one: Workload, does: Drop | Release | Finish | Activate) -> None:
        if isinstance(does, Drop):
            self.kueue.delete(one)
        elif isinstance(does, Release):
            self.kueue.merge_status(one, release_patch(one.body(), self.now))
        elif isinstance(does, Activate):
            self.kueue.set_active(one, does.active)
        else:
            self.kueue.apply_condition(one, {"type": "Finished", "status": "True", "reason": "Succeeded"})


def manifest(ask: Ask) -> dict[str, object]:
    """Give the Workload."""
    selector = {"nodeSelector": {"pool": ask.pool}} if ask.pool else {}
    pod = {"containers": [{"name": "main", "resources": {"requests": {"cpu": "1"}}}], **selector}
    pod_set = {"name": "main", "count": ask.count, "template": {"spec": pod}}
    spec = {"queueName": ask.queue, "priority": ask.priority, "podSets": [pod_set]}
    return {"metadata": {"name": ask.name}, "spec": spec}


def _state(one: Workload) -> str:
    if not one.has("QuotaReserved"):
        return "pending"
    return "evicted" if one.has("Evicted") else "admitted"


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_the_model_plays_a_scene(scenario: Scenario) -> None:
    model = Model(scenario)
    for step in some(scenario.steps):
        assert model.sim(step) == step.seen(), step.does


def test_what_is_given_back_in_part_wedges_kueue() -> None:
    """Facts of Kueue, 3: the webhook ends over one subset of the patch, the scheduler never looks again after another."""
    model = Model(SCENARIOS["bases of one class wait for each other"])
    for step in (Ask("low", 4), Ask("high", 4, 10)):
        model.sim(Step(step))
    one = model.kueue.find(TENANT, "low")
    assert one is not None
    patch = release_patch(one.body(), model.now)
    with pytest.raises(ApiError, match="nil pointer"):
        model.kueue.merge_status(one, {"status": {"admission": None}})
    for condition in patch["status"]["conditions"]:
        if condition["type"] == "Admitted":
            condition["status"] = "True"
    model.kueue.merge_status(one, patch)
    model.kueue.settle()
    assert model.kueue.queues["a"].waiting | model.kueue.queues["a"].parked == set(), "it is never looked at again"
    assert one.phase == "Admitted"


def test_pods_that_are_not_ready_in_time_cost_the_quota() -> None:
    model = Model(SCENARIOS["bases of one class wait for each other"])
    model.kueue = Kueue(lambda: model.now, pods_ready_timeout=timedelta(seconds=10))
    model._add(Queue(), "")
    model.sim(Step(Ask("base", 2)))
    one = model.kueue.find(TENANT, "base")
    assert one is not None
    model.now += timedelta(seconds=10)
    model.kueue.tick()
    model.kueue.settle()
    assert one.must_release_quota
    assert one.conditions["Evicted"]["reason"] == "PodsReadyTimeout"
    assert model.sim(Step(Release("base"))) == {"base": "pending"}
    model.now += timedelta(seconds=60)
    assert model.sim(Step(Ask("more", 1, MORE))) == {"base": "admitted", "more": "admitted"}
