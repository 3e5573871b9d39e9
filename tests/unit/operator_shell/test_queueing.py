"""The calls around quota: what is asked first, what may fail, and that nothing is given back while a pod lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import REGISTRY
from tests.unit.agents.fake_agent import until
from tests.unit.kube.bodies import JOB_UID, job_body, pod_body
from tests.unit.kube.queue_bodies import flavor_body
from tests.unit.operator_shell.api_server import serving
from tests.unit.operator_shell.queue_server import AWAY, CANNOT_CONVERT, QueueServer

from elastipod_operator import clock, metrics
from elastipod_operator.core.actions import (
    Action,
    CreatePod,
    CreateWorkload,
    DeleteWorkload,
    FinishWorkload,
    Plan,
    ReleaseBaseQuota,
    SetPodsReady,
    UpdateWorkloadPriority,
)
from elastipod_operator.core.names import ANNOTATION_STATE, ANNOTATION_WORKLOAD, PodId, workload_name
from elastipod_operator.core.record import Record
from elastipod_operator.core.record_codec import encode
from elastipod_operator.core.snapshot import ObservedWorkload
from elastipod_operator.kube.api import Api, ApiError
from elastipod_operator.kube.applied import encode_applied
from elastipod_operator.kube.queue_api import QueueApi
from elastipod_operator.kube.store import Job, Store
from elastipod_operator.queueing import Queues
from elastipod_operator.queueing.workload_control import MAX_PARALLEL_CALLS

Body = dict[str, Any]
QUEUED = {"kueue.x-k8s.io/queue-name": "gpus"}
BASE, MORE = workload_name("job", JOB_UID, 0), workload_name("job", JOB_UID, 1)
CLASS = "kueue.x-k8s.io/priority-class"
ASK_BASE = CreateWorkload(0, (("workers", 1),), "gpus")
ASK_MORE = CreateWorkload(1, (("workers", 1),), "gpus")


class Shell:
    """The calls around quota of one job, with what they rest on. woken: how often the job was."""

    def __init__(self, api: Api, server: QueueServer) -> None:
        self.server, self.store, self.woken = server, Store(lambda: clock.now()), 0
        self._api = api
        self.queues = Queues(QueueApi(api), self.store, self._wake, self._list_pods)

    @property
    def job(self) -> Job:
        return self.store.jobs[JOB_UID]

    def know(self, *, labels: Body | None = None, record: Record | None = None, **meta: Any) -> None:
        """Show a job."""
        events = {ANNOTATION_STATE: encode(record)} if record is not None else {}
        body = job_body(labels=QUEUED if labels is None else labels, annotations=events, **meta)
        self.server.put(self.server.jobs, body)
        self.store.put_job(body)

    async def do(self, *actions: Action, adopts_spec: bool = False) -> None:
        """Carry a decision out."""
        todo = Plan(record=Record(), actions=actions, adopts_spec=adopts_spec)
        await self.queues.request_quota(self.job, todo)
        await self.queues.release_quota(self.job, todo)

    async def granted(self, number: int = 0) -> ObservedWorkload:
        """Ask for a share and have it admitted."""
        await self.do(CreateWorkload(number, (("workers", 1),), "gpus"))
        self.store.put_workload(self.server.admit(workload_name("job", JOB_UID, number)))
        return self.fact(number)

    def fact(self, number: int = 0) -> ObservedWorkload:
        return next(one.fact for one in self.job.workloads.items if one.fact.number == number)

    def next_gang_check(self) -> asyncio.TimerHandle | None:
        return self.queues._workloads.state(self.job).timer

    def problem(self) -> tuple[str, str] | None:
        return self.queues.snapshot(self.job).problem

    def asked(self, what: str) -> int:
        """Give how often something was called so far, as "GET workloads"."""
        return self.server.calls.count(tuple(what.split()))  # type: ignore[arg-type]

    def _wake(self, uid: str) -> None:
        assert uid == JOB_UID
        self.woken += 1

    async def _list_pods(self, job: Job) -> None:
        bodies, version = await self._api.list_pods(job.fact.namespace, job.fact.uid)
        self.store.replace_pods(job.fact.uid, bodies, version)


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    """The calls, beside an API server whose only flavor is gpus."""
    server = QueueServer()
    server.objects["resourceflavors/gpus"] = flavor_body("gpus", {"type": "p5"})
    async with serving(server) as api:
        yield Shell(api, server)


# -- what is asked before a decision


async def test_a_job_without_a_label_costs_one_question_ever(shell: Shell) -> None:
    shell.know(labels={})
    for _ in range(3):
        await shell.queues.observe(shell.job)
    assert shell.server.calls == [("GET", "default")]
    assert shell.queues.snapshot(shell.job).default_queue is False


async def test_a_job_that_has_begun_without_a_queue_costs_nothing(shell: Shell) -> None:
    shell.know(labels={}, record=Record(generation=1))
    await shell.queues.observe(shell.job)
    await shell.do()
    await shell.queues.place_pods(shell.job, [CreatePod(PodId("workers", 0, 0), 1)])
    assert shell.server.calls == []
    assert shell.queues.snapshot(shell.job).workloads == ()


async def test_the_default_queue_is_found(shell: Shell) -> None:
    shell.server.objects["localqueues/default"] = {}
    shell.know(labels={})
    await shell.queues.observe(shell.job)
    assert shell.queues.snapshot(shell.job).default_queue is True
    assert shell.job.workloads.is_listed


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        pytest.param(CANNOT_CONVERT, True, id="only what is there has to be converted"),
        pytest.param((403, "forbidden"), False, id="who may not look sees none"),
        pytest.param((500, "out of order"), None, id="out of order: asked again"),
    ],
)
async def test_a_question_for_the_default_queue_that_fails(
    shell: Shell, answer: tuple[int, str], found: bool | None
) -> None:
    shell.server.refuse["localqueues/default"] = answer
    shell.know(labels={})
    if found is None:
        with pytest.raises(ApiError):
            await shell.queues.observe(shell.job)
    else:
        await shell.queues.observe(shell.job)
    assert shell.queues.snapshot(shell.job).default_queue is found


async def test_workloads_are_listed_before_the_first_decision_and_not_again(shell: Shell) -> None:
    shell.know(record=Record(generation=1, queue="gpus"))
    await shell.queues.observe(shell.job)
    await shell.queues.observe(shell.job)
    assert shell.server.calls == [("GET", "workloads")]


async def test_a_label_that_was_taken_off_does_not_hide_the_quota(shell: Shell) -> None:
    shell.know(labels={}, record=Record(generation=1, queue="gpus"))
    await shell.queues.observe(shell.job)
    assert shell.asked("GET workloads") == 1
    shell.store.drop_job(JOB_UID)
    shell.know(labels={}, record=Record(generation=1), version=11)
    shell.store.replace_pods(JOB_UID, [pod_body(annotations={ANNOTATION_WORKLOAD: BASE})], 50)
    await shell.queues.observe(shell.job)
    assert shell.asked("GET workloads") == 2


async def test_a_job_with_pods_is_not_decided_on_while_its_quota_is_unknown(shell: Shell) -> None:
    shell.know(record=Record(generation=1, queue="gpus"))
    shell.store.replace_pods(JOB_UID, [pod_body()], 50)
    shell.server.refuse["list"] = CANNOT_CONVERT
    with pytest.raises(ApiError, match="conversion"):
        await shell.queues.observe(shell.job)
    del shell.server.refuse["list"]
    await shell.queues.observe(shell.job)
    assert shell.job.workloads.is_listed


async def test_a_job_without_pods_is_told_of_and_looked_at_again(shell: Shell) -> None:
    shell.know()
    shell.server.refuse["list"] = CANNOT_CONVERT
    await shell.queues.observe(shell.job)
    problem = shell.problem()
    assert problem is not None
    assert problem[0] == "KueueUnavailable"
    assert (shell.job.workloads.is_listed, shell.woken) == (False, 0), "a job that wakes itself would never rest"
    assert shell.next_gang_check() is not None, "nothing else may wake it"
    del shell.server.refuse["list"]
    await shell.queues.observe(shell.job)
    assert (shell.job.workloads.is_listed, shell.problem()) == (True, None)


async def test_where_kueue_is_missing_there_is_no_quota(shell: Shell) -> None:
    shell.know(record=Record(generation=1, queue="gpus"))
    shell.store.replace_pods(JOB_UID, [pod_body()], 50)
    shell.server.refuse["list"] = (404, "the server could not find the requested resource")
    await shell.queues.observe(shell.job)
    problem = shell.problem()
    assert problem is not None
    assert problem[0] == "KueueUnavailable"
    assert "install Kueue 0.15" in problem[1]
    assert shell.job.workloads.is_listed
    assert shell.next_gang_check() is None


DELETED: dict[str, Any] = {"deletionTimestamp": "2026-03-01T12:00:00Z", "resourceVersion": "900"}


def left(shell: Shell) -> tuple[int, str]:
    """Give how many Workloads of the job are known, and why they are still there."""
    seen = shell.queues.snapshot(shell.job)
    return len(seen.workloads), seen.quota_return_error


async def test_a_deleted_job_is_asked_for_what_it_has_and_again_when_its_pods_are_gone(shell: Shell) -> None:
    shell.know()
    await shell.do(ASK_BASE)
    shell.job.workloads.clear()
    living(shell, 0, BASE)
    await shell.queues._list_pods(shell.job)
    shell.know(**DELETED)
    await shell.queues.observe(shell.job)
    await shell.queues.observe(shell.job)
    assert (shell.asked("GET workloads"), left(shell)) == (1, (1, ""))
    shell.server.pods.clear()
    await shell.queues._list_pods(shell.job)
    await shell.queues.observe(shell.job)
    assert shell.asked("GET workloads") == 2


async def test_a_deleted_job_without_a_queue_asks_nobody(shell: Shell) -> None:
    shell.know(labels={}, record=Record(), **DELETED)
    await shell.queues.observe(shell.job)
    assert shell.server.calls == []


async def test_where_kueue_is_away_a_deletion_goes_on_and_says_why_it_waits(shell: Shell, later: Any) -> None:
    shell.know(**DELETED)
    living(shell, 0, BASE)
    shell.server.refuse["list"] = AWAY
    for _ in range(2):
        await shell.queues.observe(shell.job)
    assert shell.asked("GET workloads") == 1, "the next try has its time"
    assert left(shell) == (0, f"the job's quota could not be returned: {AWAY[1]}")
    shell.server.refuse.clear()
    later(1)
    await shell.queues.observe(shell.job)
    assert left(shell) == (0, "")


async def test_what_cannot_be_deleted_is_told_until_it_can(shell: Shell, later: Any) -> None:
    shell.know()
    fact = await shell.granted()
    shell.know(**DELETED)
    shell.server.refuse["delete"] = (403, "forbidden")
    order = DeleteWorkload(BASE, fact.uid, "a test")
    await shell.do(order)
    later(1)
    await shell.queues.observe(shell.job)
    assert left(shell) == (1, "the job's quota could not be returned: forbidden")
    shell.server.refuse.clear()
    await shell.do(order)
    assert left(shell) == (0, "")


async def test_what_somebody_else_took_away_is_told_no_more(shell: Shell, later: Any) -> None:
    shell.know()
    fact = await shell.granted()
    shell.know(**DELETED)
    shell.server.refuse["delete"] = (403, "forbidden")
    await shell.do(DeleteWorkload(BASE, fact.uid, "a test"))
    later(1)
    shell.server.refuse["list"] = (404, "the server could not find the requested resource")
    await shell.queues.observe(shell.job)
    assert left(shell) == (0, ""), "the API server has no Workloads any more"


async def test_a_workload_of_other_templates_is_outdated(shell: Shell) -> None:
    shell.know()
    await shell.granted()
    assert [w.is_outdated for w in shell.queues.snapshot(shell.job).workloads] == [False]
    spec = job_body()["spec"]
    spec["replicaSpecs"][0]["template"]["spec"]["nodeSelector"] = {"pool": "b"}
    shell.store.put_job(job_body(spec, labels=QUEUED, version=1000))
    assert [w.is_outdated for w in shell.queues.snapshot(shell.job).workloads] == [True]
    del shell.server.workloads[BASE]["metadata"]["annotations"]
    shell.store.put_workload(shell.server.put(shell.server.workloads, shell.server.workloads[BASE]))
    assert [w.is_outdated for w in shell.queues.snapshot(shell.job).workloads] == [False], "it does not tell"


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_waits_and_evictions_are_counted_once(shell: Shell, later: Any) -> None:
    waits = {"share": "base"}
    evictions = {"share": "base", "cause": "Deactivated"}
    before = (
        counted("elastipod_quota_wait_seconds_sum", **waits),
        counted("elastipod_quota_evictions_total", **evictions),
    )
    shell.know()
    await shell.do(ASK_BASE)
    for _ in range(2):
        shell.queues.snapshot(shell.job)
        later(20)
    shell.store.put_workload(shell.server.admit(BASE))
    shell.queues.snapshot(shell.job)
    later(20)
    shell.queues.snapshot(shell.job)
    assert counted("elastipod_quota_wait_seconds_sum", **waits) == before[0] + 40
    shell.store.put_workload(shell.server.evict(BASE, "DeactivatedDueToRequeuingLimitExceeded"))
    shell.queues.snapshot(shell.job)
    shell.queues.snapshot(shell.job)
    assert counted("elastipod_quota_evictions_total", **evictions) - before[1] == 1


# -- asking


async def test_asking_creates_a_workload_that_is_known_at_once(shell: Shell) -> None:
    timed = ("elastipod_api_write_seconds_count", {"what": "workload"})
    before = REGISTRY.get_sample_value(*timed) or 0
    shell.know()
    await shell.do(ASK_BASE)
    assert REGISTRY.get_sample_value(*timed) == before + 1
    assert shell.fact().counts == (("workers", 1),)
    assert shell.woken > 0
    body = shell.server.workloads[BASE]
    assert (body["spec"]["queueName"], body["spec"]["priority"]) == ("gpus", 0)
    await shell.do(ASK_BASE)
    assert (shell.asked("POST workloads"), len(shell.server.workloads), shell.problem()) == (2, 1, None)


async def test_increments_are_pinned_to_the_base_and_below_all_bases(shell: Shell) -> None:
    shell.know()
    await shell.do(ASK_MORE)
    assert shell.server.workloads == {}, "there is no base yet"
    await shell.granted()
    await shell.do(ASK_MORE, CreateWorkload(2, (("workers", 1),), "gpus"))
    more = shell.server.workloads[MORE]
    assert more["spec"]["priority"] == -1_000_000_000
    assert more["spec"]["podSets"][0]["template"]["spec"]["nodeSelector"] == {"type": "p5"}
    assert shell.asked("GET gpus") == 1, "flavors are not read for each increment"


async def test_a_decision_that_takes_edits_asks_for_the_edited_pods(shell: Shell) -> None:
    before = job_body()["spec"]
    after = job_body()["spec"]
    after["replicaSpecs"][0]["template"]["spec"]["nodeSelector"] = {"pool": "b"}
    body = job_body(after, labels=QUEUED, annotations={"elastipod.io/applied": encode_applied(before)})
    shell.store.put_job(body)
    await shell.do(ASK_BASE)
    assert "nodeSelector" not in shell.server.workloads.pop(BASE)["spec"]["podSets"][0]["template"]["spec"]
    await shell.do(ASK_BASE, adopts_spec=True)
    assert shell.server.workloads[BASE]["spec"]["podSets"][0]["template"]["spec"]["nodeSelector"] == {"pool": "b"}


@pytest.mark.parametrize(
    ("answer", "reason", "said"),
    [
        ((404, "the server could not find the requested resource"), "KueueUnavailable", "install Kueue 0.15 or newer"),
        ((404, 'namespaces "team" not found'), "WorkloadRefused", 'namespaces "team" not found'),
        (AWAY, "KueueUnavailable", "Kueue does not answer the API server"),
        ((403, "forbidden: exceeded quota"), "WorkloadRefused", "exceeded quota"),
        ((422, "spec.podSets: Invalid value"), "WorkloadRefused", "spec.podSets: Invalid value"),
        ((500, "out of order"), "WorkloadRefused", "out of order"),
    ],
)
async def test_what_is_refused_is_told_and_tried_again_later(
    shell: Shell, later: Any, answer: tuple[int, str], reason: str, said: str
) -> None:
    shell.know()
    shell.server.refuse["create"] = answer
    await shell.do(ASK_BASE)
    problem = shell.problem()
    assert problem is not None
    assert (problem[0], said in problem[1]) == (reason, True)
    woken = shell.woken
    assert woken == 1
    await shell.do(ASK_BASE)
    assert (shell.asked("POST workloads"), shell.woken) == (1, woken), (
        "not before its time, and nobody is woken for nothing"
    )
    later(1)
    await shell.do(ASK_BASE)
    later(1)
    await shell.do(ASK_BASE)
    assert shell.asked("POST workloads") == 2, "the wait grows"
    del shell.server.refuse["create"]
    later(1)
    await shell.do(ASK_BASE)
    assert (shell.problem(), len(shell.server.workloads)) == (None, 1)


async def test_the_wait_ends_when_kueue_is_back(shell: Shell, later: Any) -> None:
    shell.know()
    shell.server.refuse["create"] = AWAY
    await shell.do(ASK_BASE)
    del shell.server.refuse["create"]
    woken = shell.woken
    shell.queues.retry_all()
    assert shell.woken == woken + 1
    await shell.do(ASK_BASE)
    assert shell.problem() is None


async def test_a_wish_that_is_gone_takes_its_trouble_along(shell: Shell) -> None:
    shell.know()
    shell.server.refuse["create"] = (403, "no")
    await shell.do(ASK_BASE)
    await shell.do()
    assert shell.problem() is None


async def test_a_missing_priority_class_is_a_reason_of_its_own(shell: Shell) -> None:
    shell.know(labels={**QUEUED, "kueue.x-k8s.io/priority-class": "none"})
    await shell.do(ASK_BASE)
    problem = shell.problem()
    assert problem is not None
    assert problem[0] == "PriorityClassMissing"


async def test_a_strange_workload_of_that_name_is_told_of(shell: Shell) -> None:
    shell.know()
    await shell.do(ASK_BASE)
    strange = shell.server.workloads[BASE]
    strange["metadata"] |= {"ownerReferences": [], "uid": "strange"}
    shell.server.put(shell.server.workloads, strange)
    shell.job.workloads.clear()
    await shell.do(ASK_BASE)
    problem = shell.problem()
    assert problem is not None
    assert "exists and does not belong to this job" in problem[1]


# -- pods


def create(workload: str, ordinal: int = 0) -> CreatePod:
    return CreatePod(PodId("workers", ordinal, 0), 1, workload=workload)


async def test_pods_are_placed_as_kueue_says(shell: Shell) -> None:
    shell.know()
    await shell.granted()
    ((order, placed),), _ = await shell.queues.place_pods(shell.job, [create(BASE)])
    assert order == create(BASE)
    assert placed is not None
    assert placed.node_selector == {"type": "p5"}
    assert placed.annotations[ANNOTATION_WORKLOAD] == BASE


async def test_no_pod_on_quota_that_is_gone_by_now(shell: Shell) -> None:
    """The decision rests on what the watch has shown; the API server knows better."""
    shell.know()
    await shell.granted()
    await shell.granted(1)
    shell.server.evict(BASE)
    woken = shell.woken
    ready, _ = await shell.queues.place_pods(shell.job, [create(BASE), create(MORE, 1), create("", 2)])
    assert [order.workload for order, _ in ready] == ["", MORE]
    assert shell.fact(0).eviction_reason == "Preempted"
    assert shell.woken > woken
    del shell.server.workloads[MORE]
    assert await shell.queues.place_pods(shell.job, [create(MORE, 1)]) == ([], "")
    assert [one.fact.number for one in shell.job.workloads.items] == [0]


async def test_a_clash_is_told_and_no_pod_is_made(shell: Shell) -> None:
    shell.know()
    await shell.granted()
    shell.server.admit(BASE, flavor="gone")
    ready, problem = await shell.queues.place_pods(shell.job, [create(BASE)])
    assert ready == []
    assert "ResourceFlavor gone" in problem
    assert shell.problem() == ("PodPlacementFailed", problem)
    shell.server.admit(BASE)
    assert len((await shell.queues.place_pods(shell.job, [create(BASE)]))[0]) == 1
    assert shell.problem() is None


async def test_a_flavor_that_may_not_be_read_is_told_and_no_pod_is_made(shell: Shell) -> None:
    shell.know()
    await shell.granted()
    shell.server.refuse["resourceflavors/gpus"] = (403, "resourceflavors is forbidden")
    ready, problem = await shell.queues.place_pods(shell.job, [create(BASE)])
    assert (ready, problem) == ([], f"the flavors of Workload {BASE} cannot be read: resourceflavors is forbidden")
    assert shell.problem() == ("PodPlacementFailed", problem)
    shell.server.refuse["resourceflavors/gpus"] = (503, "later")
    with pytest.raises(ApiError):
        await shell.queues.place_pods(shell.job, [create(BASE)])


async def test_pods_can_be_replaced_while_kueue_is_away(shell: Shell) -> None:
    shell.know()
    await shell.granted()
    shell.server.refuse["read"] = CANNOT_CONVERT
    with pytest.raises(ApiError):
        await shell.queues.place_pods(shell.job, [create(BASE)])
    del shell.server.refuse["read"]
    await shell.queues.place_pods(shell.job, [create(BASE)])
    shell.server.refuse["read"] = CANNOT_CONVERT
    assert len((await shell.queues.place_pods(shell.job, [create(BASE)]))[0]) == 1
    shell.store.put_workload(shell.server.evict(BASE))
    assert await shell.queues.place_pods(shell.job, [create(BASE)]) == ([], ""), "the watch knows better"


# -- giving back


def living(shell: Shell, ordinal: int, workload: str, phase: str = "Running") -> None:
    """Put a pod on the API server, of which no watch has told."""
    pod = pod_body(ordinal, status={"phase": phase}, annotations={ANNOTATION_WORKLOAD: workload})
    shell.server.put(shell.server.pods, pod)


GIVERS = [
    pytest.param(lambda w: DeleteWorkload(w.name, w.uid, "a test"), id="drop"),
    pytest.param(lambda w: ReleaseBaseQuota(w.name, w.uid), id="release"),
    pytest.param(lambda w: FinishWorkload(w.name, w.uid, True, "done"), id="finish"),
]


@pytest.mark.parametrize("order_of", GIVERS)
@pytest.mark.parametrize(
    ("ordinal", "workload"), [pytest.param(7, BASE, id="made for it"), pytest.param(0, "", id="in its slot")]
)
async def test_nothing_is_given_back_while_a_pod_lives(
    shell: Shell, later: Any, order_of: Any, ordinal: int, workload: str
) -> None:
    shell.know()
    await shell.granted()
    shell.store.put_workload(shell.server.evict(BASE))
    living(shell, ordinal, workload)
    before = shell.server.workloads[BASE]["metadata"]["resourceVersion"]
    await shell.do(order_of(shell.fact()))
    assert shell.server.workloads[BASE]["metadata"]["resourceVersion"] == before
    assert shell.asked("GET pods") == 1
    assert len(shell.job.pods) == 1, "the next decision sees it"
    living(shell, ordinal, workload, "Succeeded")
    await shell.do(order_of(shell.fact()))
    found = shell.server.workloads.get(BASE)
    assert found is None or found["metadata"]["resourceVersion"] != before


async def test_what_waits_goes_whatever_lives_in_its_slots(shell: Shell) -> None:
    shell.know()
    await shell.do(ASK_BASE)
    living(shell, 0, BASE)
    await shell.do(DeleteWorkload(BASE, shell.fact().uid, "a test"))
    assert shell.server.workloads == {}


async def test_one_that_cannot_be_given_back_does_not_keep_the_others(shell: Shell, later: Any) -> None:
    shell.know()
    await shell.granted()
    more = await shell.granted(1)
    shell.store.put_workload(shell.server.evict(BASE))
    shell.server.refuse["release"] = (409, "the object has been modified")
    orders = (ReleaseBaseQuota(BASE, shell.fact().uid), DeleteWorkload(more.name, more.uid, "a test"))
    await shell.do(*orders)
    assert set(shell.server.workloads) == {BASE}
    shell.server.refuse["release"] = AWAY
    later(1)
    await shell.do(orders[0])
    assert shell.asked("PATCH status") == 2


class Calls:
    """Lets the calls of one kind through, and notes how many are under way at the same time."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.made = self.under_way = self.most = 0

    async def __call__(self, *arguments: Any) -> Any:
        self.made += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(0)
            return await self._call(*arguments)
        finally:
            self.under_way -= 1


async def many(shell: Shell) -> list[ObservedWorkload]:
    """Have a job that holds quota for more shares than calls are made at a time."""
    shell.know()
    await shell.granted()
    numbers = range(1, 3 * MAX_PARALLEL_CALLS)
    await shell.do(*(CreateWorkload(number, (("workers", 1),), "gpus") for number in numbers))
    for number in numbers:
        shell.store.put_workload(shell.server.admit(workload_name("job", JOB_UID, number)))
    return [one.fact for one in shell.job.workloads.items]


async def test_what_a_job_holds_is_given_back_side_by_side(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = await many(shell)
    api = shell.queues._workloads.api
    monkeypatch.setattr(api, "delete_workload", calls := Calls(api.delete_workload))
    await shell.do(*(DeleteWorkload(fact.name, fact.uid, "a test") for fact in facts))
    assert shell.server.workloads == {}
    assert (calls.made, calls.most) == (len(facts), MAX_PARALLEL_CALLS)


async def test_pods_are_told_of_side_by_side_and_one_that_is_refused_keeps_no_other(
    shell: Shell, later: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = await many(shell)
    api = shell.queues._workloads.api
    monkeypatch.setattr(api, "apply_workload_status", calls := Calls(api.apply_workload_status))
    shell.server.workloads[facts[0].name]["metadata"]["uid"] = "another"
    await shell.do(*(SetPodsReady(fact.name, fact.uid, True, False) for fact in facts))
    assert [one.fact.pods_ready for one in shell.job.workloads.items] == [None, *[True] * (len(facts) - 1)]
    assert calls.most == MAX_PARALLEL_CALLS


async def test_while_kueue_is_away_the_others_are_not_tried_in_vain(shell: Shell) -> None:
    facts = await many(shell)
    shell.server.refuse["delete"] = AWAY
    await shell.do(*(DeleteWorkload(fact.name, fact.uid, "a test") for fact in facts))
    assert 1 <= len([call for call in shell.server.calls if call[0] == "DELETE"]) <= MAX_PARALLEL_CALLS


async def test_pods_of_other_shares_do_not_matter(shell: Shell) -> None:
    shell.know()
    await shell.granted()
    more = await shell.granted(1)
    living(shell, 0, BASE)
    await shell.do(DeleteWorkload(more.name, more.uid, "a test"))
    assert set(shell.server.workloads) == {BASE}
    assert [one.fact.number for one in shell.job.workloads.items] == [0]


async def test_what_others_wait_for_is_given_back_first(shell: Shell, caplog: pytest.LogCaptureFixture) -> None:
    shell.know()
    await shell.granted()
    waits = workload_name("job", JOB_UID, 1)
    await shell.do(CreateWorkload(1, (("workers", 1),), "gpus"))
    evicted = (await shell.granted(2)).name
    shell.store.put_workload(shell.server.evict(evicted))
    caplog.set_level("INFO")
    facts = [shell.fact(number) for number in (1, 0, 2)]
    await shell.do(*(FinishWorkload(fact.name, fact.uid, True, "done") for fact in facts))
    told = [record.workload for record in caplog.records if record.message == "quota returned"]  # type: ignore[attr-defined]
    assert told == [evicted, BASE, waits]


async def test_a_job_is_looked_at_once_for_all_who_wait(shell: Shell) -> None:
    shell.know()
    control = shell.queues._workloads
    control.wake_later(shell.job, 60)
    first = shell.next_gang_check()
    control.wake_later(shell.job, 90)
    assert shell.next_gang_check() is first, "that comes early enough"
    control.wake_later(shell.job, 0)
    assert first is not None
    assert first.cancelled()
    await until(lambda: shell.woken == 1)
    control.wake_later(shell.job, 60)
    second = shell.next_gang_check()
    shell.server.refuse["create"] = AWAY
    await shell.do(ASK_BASE)
    assert shell.next_gang_check() is second, "what failed has a time of its own"
    await until(lambda: shell.woken == 3)  # for the problem, and a second later to try again


async def test_a_released_base_is_in_the_queue_again(shell: Shell) -> None:
    shell.know()
    await shell.granted()
    shell.store.put_workload(shell.server.evict(BASE))
    await shell.do(ReleaseBaseQuota(BASE, shell.fact().uid))
    fact = shell.fact()
    assert (fact.reserved, fact.admitted, fact.eviction_reason, fact.pods_ready) == (False, False, "", False)
    assert "admission" not in shell.server.workloads[BASE]["status"]


async def test_a_release_rests_on_what_stands_there_now(shell: Shell) -> None:
    """What the watch showed is old by now: another look tells that there is nothing to release."""
    shell.know()
    await shell.granted()
    evicted = shell.server.evict(BASE)
    shell.store.put_workload(evicted)
    uid = shell.fact().uid
    shell.server.admit(BASE)
    await shell.do(ReleaseBaseQuota(BASE, uid))
    assert shell.asked("PATCH status") == 0
    assert shell.fact().admitted
    del shell.server.workloads[BASE]
    shell.store.put_workload(shell.server.put({}, evicted))
    await shell.do(ReleaseBaseQuota(BASE, uid))
    assert shell.job.workloads.items == ()


async def test_a_base_that_cannot_be_released_is_deleted_in_the_end(shell: Shell, later: Any) -> None:
    shell.know()
    await shell.granted()
    shell.store.put_workload(shell.server.evict(BASE))
    order = ReleaseBaseQuota(BASE, shell.fact().uid)
    for answer in (AWAY, (409, "modified"), (422, "refused"), (500, "panic"), AWAY, (422, "refused")):
        shell.server.refuse["release"] = answer
        later(60)
        await shell.do(order)
        assert BASE in shell.server.workloads
    later(60)
    await shell.do(order)
    assert shell.server.workloads == {}
    assert shell.job.workloads.items == ()


async def test_what_fails_is_tried_again_later_and_ends_no_pass(shell: Shell, later: Any) -> None:
    shell.know()
    fact = await shell.granted()
    shell.server.refuse |= {"delete": (500, "out of order"), "tell": AWAY}
    orders = (DeleteWorkload(BASE, fact.uid, "a test"), SetPodsReady(BASE, fact.uid, True, False))
    await shell.do(*orders)
    await shell.do(*orders)
    assert (shell.asked(f"DELETE {BASE}"), shell.asked("PATCH status")) == (1, 1)
    shell.server.refuse = {}
    later(1)
    await shell.do(*orders)
    assert shell.server.workloads == {}


async def test_quota_that_may_not_be_given_back_is_told_until_it_was(shell: Shell, later: Any) -> None:
    shell.know()
    fact = await shell.granted()
    order = DeleteWorkload(BASE, fact.uid, "a test")
    told = []
    for answer in (AWAY, (500, "panic"), (403, "forbidden"), (500, "panic")):
        shell.server.refuse["delete"] = answer
        later(60)
        await shell.do(order)
        told.append(shell.queues.snapshot(shell.job).quota_return_error)
    refused = "the job's quota could not be returned: forbidden"
    assert told == ["", "", refused, refused]
    assert shell.problem() is None, "that is no reason for which quota is not asked for"
    shell.server.refuse.clear()
    del shell.server.workloads[BASE]  # somebody else did it
    await shell.do()
    assert shell.queues.snapshot(shell.job).quota_return_error == ""


async def test_a_workload_that_is_gone_or_another_one_by_now_is_forgotten(shell: Shell) -> None:
    shell.know()
    fact = await shell.granted()
    shell.server.workloads[BASE]["metadata"]["uid"] = "another"
    await shell.do(DeleteWorkload(BASE, fact.uid, "a test"))
    assert BASE in shell.server.workloads
    assert shell.job.workloads.items == ()
    shell.server.workloads.clear()
    fact = await shell.granted()
    shell.server.workloads.clear()
    await shell.do(SetPodsReady(BASE, fact.uid, True, False))
    assert shell.job.workloads.items == ()


@pytest.mark.parametrize(
    "order_of",
    [lambda w: SetPodsReady(w.name, w.uid, True, False), lambda w: FinishWorkload(w.name, w.uid, True, "done")],
    ids=["mark", "finish"],
)
async def test_what_somebody_wrote_meanwhile_is_not_taken_for_gone(
    shell: Shell, later: Any, caplog: pytest.LogCaptureFixture, order_of: Any
) -> None:
    """Without its base the job would stop."""
    shell.know()
    fact = await shell.granted()
    shell.server.refuse["tell"] = (409, "the object has been modified")
    await shell.do(order_of(fact))
    assert shell.fact() == fact
    assert "could not be" not in caplog.text
    shell.server.refuse.clear()
    later(1)
    await shell.do(order_of(fact))
    assert shell.fact() != fact
    assert shell.asked("PATCH status") == 2


async def test_a_workload_that_somebody_keeps_is_on_its_way(shell: Shell) -> None:
    shell.know()
    fact = await shell.granted()
    shell.server.workloads[BASE]["metadata"]["finalizers"] = ["somebody.io/keeps"]
    await shell.do(DeleteWorkload(BASE, fact.uid, "a test"))
    assert shell.fact().is_deleting


async def test_kueue_is_told_by_a_manager_for_each_condition(shell: Shell) -> None:
    shell.know()
    fact = await shell.granted()
    await shell.do(SetPodsReady(BASE, fact.uid, True, False))
    assert shell.fact().pods_ready is True
    await shell.do(FinishWorkload(BASE, fact.uid, False, "it failed"))
    assert shell.fact().finished
    assert shell.fact().pods_ready is True
    assert shell.server.managers == ["elastipod-operator-PodsReady", "elastipod-operator-Finished"]


async def test_a_job_that_is_gone_is_forgotten(shell: Shell) -> None:
    shell.know()
    shell.server.refuse["create"] = (403, "no")
    await shell.do(ASK_BASE)
    shell.queues.forget(JOB_UID)
    shell.queues.retry_all()
    assert shell.problem() is None
    await asyncio.sleep(0)


async def test_increments_that_must_be_beside_the_base_wait_for_its_place(shell: Shell) -> None:
    template = {
        "metadata": {"annotations": {"kueue.x-k8s.io/podset-required-topology": "rack"}},
        "spec": {"containers": [{"name": "train", "image": "train:1"}]},
    }
    shell.store.put_job(
        job_body({"replicaSpecs": [{"name": "workers", "replicas": 2, "template": template}]}, labels=QUEUED)
    )
    await shell.granted()
    await shell.do(ASK_MORE)
    assert (set(shell.server.workloads), shell.problem()) == ({BASE}, None)


# -- priorities that were edited


def ranks(shell: Shell) -> dict[int, tuple[int, Any]]:
    """Give priority and class of each Workload as the API server has them."""
    found = {}
    for body in shell.server.workloads.values():
        named = (body["spec"].get("priorityClassRef") or {}).get("name")
        found[int(body["metadata"]["labels"]["elastipod.io/share"])] = (body["spec"]["priority"], named)
    return found


async def rank_all(shell: Shell) -> None:
    """Do what a decision would have done about the priorities that are seen to differ."""
    wrong = [w for w in shell.queues.snapshot(shell.job).workloads if w.has_outdated_priority]
    await shell.do(*(UpdateWorkloadPriority(w.name, w.uid) for w in wrong))


async def test_an_edited_class_reaches_the_base_and_then_the_increments(shell: Shell) -> None:
    for name, value in (("low", 10), ("high", 1000)):
        shell.server.objects[f"workloadpriorityclasses/{name}"] = {"metadata": {"name": name}, "value": value}
    shell.know(labels={**QUEUED, CLASS: "low"})
    await shell.granted()
    await shell.do(ASK_MORE)
    assert ranks(shell) == {0: (10, "low"), 1: (-999_999_990, None)}
    assert not any(w.has_outdated_priority for w in shell.queues.snapshot(shell.job).workloads)
    shell.know(labels={**QUEUED, CLASS: "high"}, version=99)
    await rank_all(shell)
    assert ranks(shell) == {0: (1000, "high"), 1: (-999_999_990, None)}
    await rank_all(shell)
    assert ranks(shell) == {0: (1000, "high"), 1: (-999_999_000, None)}
    assert not any(w.has_outdated_priority for w in shell.queues.snapshot(shell.job).workloads)
    shell.know(labels={**QUEUED, CLASS: "none"}, version=100)
    await rank_all(shell)
    assert shell.problem() == (
        "PriorityClassMissing", "WorkloadPriorityClass none, which label kueue.x-k8s.io/priority-class names, does not exist",
    )  # fmt: skip
    shell.know(labels={**QUEUED, CLASS: "high"}, version=101)
    await rank_all(shell)
    assert shell.problem() is None
    assert ranks(shell) == {0: (1000, "high"), 1: (-999_999_000, None)}


async def test_a_priority_that_is_refused_is_tried_again_later(
    shell: Shell, later: Any, caplog: pytest.LogCaptureFixture
) -> None:
    shell.know()
    first = await shell.granted()
    shell.server.refuse["patch"] = (403, "workloads is forbidden")
    for _ in range(2):
        await shell.do(UpdateWorkloadPriority(BASE, first.uid))
    assert caplog.text.count("a priority could not be changed") == 1
    refused = "the API server refuses the edited priority: workloads is forbidden"
    assert shell.problem() == ("PriorityRefused", refused)
    later(5)
    caplog.set_level("WARNING")
    shell.server.refuse["patch"] = (409, "the object has been modified")
    await shell.do(UpdateWorkloadPriority(BASE, first.uid))
    assert caplog.text.count("a priority could not be changed") == 1, "nobody need be told of that"
    assert shell.fact() == first, "without its base the job would stop"
    assert shell.asked(f"PATCH {BASE}") == 2
    shell.server.refuse.clear()
    later(60)
    await shell.do(UpdateWorkloadPriority(BASE, first.uid))
    assert shell.asked(f"PATCH {BASE}") == 3
    shell.server.workloads.clear()
    await shell.do(UpdateWorkloadPriority(BASE, first.uid))
    assert shell.job.workloads.items == ()


async def test_a_priority_that_is_changed_back_is_told(shell: Shell, later: Any) -> None:
    shell.know()
    first = await shell.granted()
    shell.server.keeps = {"priority": 3}
    await shell.do(UpdateWorkloadPriority(BASE, first.uid))
    assert shell.problem() == ("PriorityRefused", f"another client reverts the priority of Workload {BASE}")
    shell.server.keeps = {}
    later(5)
    await shell.do(UpdateWorkloadPriority(BASE, first.uid))
    assert shell.problem() is None


async def test_quota_that_should_be_back_is_counted(shell: Shell, later: Any) -> None:
    metrics.export_leading()

    def late() -> float | None:
        shell.queues.snapshot(shell.job)
        return REGISTRY.get_sample_value("elastipod_quota_evictions_overdue")

    shell.know()
    await shell.granted()
    shell.store.put_workload(shell.server.evict(BASE))
    later(60)
    assert late() == 0.0, "its workers save, and its pods go"
    later(10_000)
    assert late() == 1.0
    await shell.do(DeleteWorkload(BASE, shell.fact().uid, "it is over"))
    assert late() == 0.0
