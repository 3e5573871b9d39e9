"""Pods that are created beside the decisions about their job: none twice, none that is not wanted any more, none forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from tests.patience import PATIENCE_S
from tests.unit.agents.fake_agent import until
from tests.unit.core.builders import job, pid, pod
from tests.unit.kube.bodies import CREATED, JOB_UID, job_body
from tests.unit.operator_shell.pod_controls import Told, pod_control_for
from tests.unit.operator_shell.shells import Decisions, Shell, decide_again, settled

from elastipod_operator.core.actions import CreatePod
from elastipod_operator.core.names import ANNOTATION_APPLIED, FINALIZER, LABEL_SPEC
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.snapshot import ContainerState, ObservedContainer
from elastipod_operator.in_flight import WRITE_PARALLEL
from elastipod_operator.job_task import Decision, JobTask
from elastipod_operator.kube.api import ApiError
from elastipod_operator.kube.applied import encode_applied
from elastipod_operator.kube.job_keys import JobKeys
from elastipod_operator.kube.placement import Placement
from elastipod_operator.kube.pods import pod_manifest
from elastipod_operator.kube.store import Job
from elastipod_operator.pod_creation import PodCreation
from elastipod_operator.pod_deletion import PodDeletion

Later = Callable[[float], None]
RUNS, WAITS = ObservedContainer(ContainerState.RUNNING), ObservedContainer(ContainerState.WAITING)


class Pods:
    """Creates pods; answers: what is said of them by name, in place of that."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.tries = 0
        self.lists = 0
        self.there: list[Any] = []
        self.manifests: list[Mapping[str, Any]] = []
        self.answers: dict[str, Exception] = {}
        self.let = asyncio.Event()
        self.let.set()

    async def create_pod(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        self.tries += 1
        await self.let.wait()
        name = manifest["metadata"]["name"]
        if name in self.answers:
            raise self.answers[name]
        self.made.append(name)
        self.manifests.append(manifest)
        meta = {**manifest["metadata"], "uid": f"uid-{name}", "resourceVersion": "7", "creationTimestamp": CREATED}
        return {**manifest, "kind": "Pod", "metadata": meta, "status": {"phase": "Pending"}}

    async def list_pods(self, namespace: str, uid: str) -> tuple[list[Any], int]:
        self.lists += 1
        return self.there, 8


class Creating:
    """The creations of one job."""

    def __init__(self) -> None:
        self.api, self.told = Pods(), Told()
        self.control = pod_control_for(self.api, self.told)
        self.creation = PodCreation(self.control, JOB_UID)

    async def decide(self, *ordinals: int) -> None:
        """Have pods created, as one decision does, and wait for what comes of it."""
        wanted = [CreatePod(pid(n), 2) for n in ordinals]
        self.told.woken = 0
        assert self.creation.keep_only(wanted)
        held = Job(job_body(), job(), 1)
        if await self.creation.create_secret(held, self.creation.missing(wanted)):
            await self.creation.begin(held, self.creation.missing(wanted))
        await until(lambda: self.creation.calls.is_idle)

    @property
    def why(self) -> str:
        return self.creation.backoff.refusal


async def test_what_is_created_is_known_at_once_and_decided_about_once() -> None:
    creating = Creating()
    await creating.decide(0, 1)
    assert [pod.name for pod in creating.control.store.jobs[JOB_UID].pods.values()] == creating.api.made
    assert (len(creating.api.made), creating.told.woken) == (2, 1)
    await creating.decide()
    assert creating.told.woken == 0


async def test_while_the_secret_cannot_be_written_no_pod_is_made_and_the_pass_goes_on() -> None:
    """As with a broken encryption of Secrets: a worker that is lost meanwhile needs stops, which need no Secret."""
    creating = Creating()
    creating.api.create_secret = mock.AsyncMock(side_effect=ApiError(500, "the encryption of Secrets is away"))  # type: ignore[attr-defined]
    creation = PodCreation(replace(creating.control, keys=JobKeys((b"k" * 32,))), JOB_UID)
    assert await creation.create_secret(Job(job_body(), job(), 1), [CreatePod(pid(0), 2)]) is False
    assert (creation.backoff.is_active(), creation.backoff.refusal) == (True, "")
    assert creating.told.failures == ["the encryption of Secrets is away"]


async def test_a_pod_is_made_as_its_decision_and_its_place_say() -> None:
    order = CreatePod(pid(1), 5, generation=7, avoids=("bad",), workload="w", only_on=("good",), failures_before=3)
    held, placement = Job(job_body(), job(), 1), Placement(node_selector={"pool": "a"})

    async def place(*_: object) -> Any:
        return [(order, placement)], ""

    creating = Creating()
    control = replace(creating.control, place=place, keys=JobKeys((b"k" * 32,)))
    creation = PodCreation(control, JOB_UID)
    await creation.begin(held, [order])
    await until(lambda: creation.calls.is_idle)
    policy, key = held.fact.policy, control.keys.of(held.fact)
    assert policy is not None
    assert key is not None
    (made,) = creating.api.manifests
    assert made == pod_manifest(
        held.fact, held.body["spec"], policy, pid(1), 5, key.secret,
        generation=7, avoids=("bad",), only_on=("good",), failures_before=3, placed=placement,
    )  # fmt: skip


async def test_a_refusal_is_told_tried_again_later_and_then_told_no_more(later: Later) -> None:
    creating = Creating()
    creating.api.answers = dict.fromkeys(
        (pid(0).name("job"), pid(2).name("job")), ApiError(403, "exceeded quota: team")
    )
    await creating.decide(0, 1, 2)
    assert creating.why == "1 pod was refused by the API server, and 2 more not tried: exceeded quota: team"
    assert (creating.told.woken, creating.api.tries, creating.told.failures) == (1, 1, [])
    await creating.decide(0, 1, 2)
    assert creating.api.tries == 1, "too early to try again"
    later(7)
    creating.api.answers = {}
    await creating.decide(0, 1, 2)
    assert (creating.why, creating.told.woken, len(creating.api.made)) == ("", 1, 3)


async def test_a_failure_is_no_refusal_and_rests_for_less(later: Later) -> None:
    creating = Creating()
    creating.api.answers = {pid(0).name("job"): ApiError(503, "no etcd")}
    for wait_s in (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 15, 15):
        tries = creating.api.tries
        await creating.decide(0)
        assert (creating.why, creating.api.tries) == ("", tries + 1)
        later(wait_s * 0.9)
        await creating.decide(0)
        assert creating.api.tries == tries + 1, "too early to try again"
        later(wait_s * 0.4)
    assert creating.told.failures == ["no etcd"] * 9
    creating.api.answers = {}
    await creating.decide(0)
    assert len(creating.api.made) == 1


QUOTA_CONFLICT = (
    'Operation cannot be fulfilled on resourcequotas "team": the object has been modified; please apply your changes to the '
    "latest version and try again"
)


async def test_a_quota_that_others_use_at_the_same_moment_is_tried_again_soon_and_stops_nothing(later: Later) -> None:
    creating = Creating()
    creating.api.answers = {pid(1).name("job"): ApiError(409, QUOTA_CONFLICT)}
    await creating.decide(0, 1, 2, 3)
    assert (creating.why, len(creating.api.made), creating.told.failures) == ("", 3, [QUOTA_CONFLICT])
    creating.api.answers = {}
    later(0.3)
    await creating.decide(1)
    assert len(creating.api.made) == 4


SECRET_REFUSALS = (
    pytest.param(ApiError(403, "secrets is forbidden"), id="the right was taken away"),
    pytest.param(ApiError(403, "exceeded quota: count/secrets"), id="a quota, which is asked before the name"),
)


class Secrets:
    """The Secrets of the API server: `answer` is raised in place of creating one."""

    def __init__(self) -> None:
        self.answer: Exception | None = None
        self.calls = 0

    async def create_secret(self, manifest: Mapping[str, Any]) -> None:
        self.calls += 1
        if self.answer is not None:
            raise self.answer


def with_keys(creating: Creating, secrets: Secrets) -> tuple[PodCreation, str]:
    """Give the creations of a job with a key, and the name of its Secret."""
    creating.api.create_secret = secrets.create_secret  # type: ignore[attr-defined]
    control = replace(creating.control, keys=JobKeys((b"k" * 32,)))
    key = control.keys.of(job())
    assert key is not None
    return PodCreation(control, JOB_UID), key.secret


@pytest.mark.parametrize("known", [None, ApiError(409, 'secrets "x" already exists')], ids=["created", "there"])
@pytest.mark.parametrize("refusal", SECRET_REFUSALS)
async def test_a_secret_that_was_made_once_lets_pods_be_replaced(
    caplog: pytest.LogCaptureFixture, refusal: ApiError, known: Exception | None
) -> None:
    secrets = Secrets()
    creation, _ = with_keys(Creating(), secrets)
    held, orders = Job(job_body(), job(), 1), [CreatePod(pid(0), 2)]
    secrets.answer = known
    assert await creation.create_secret(held, orders)
    secrets.answer = refusal
    assert await creation.create_secret(held, orders)
    assert await creation.create_secret(held, orders)
    assert (secrets.calls, creation.backoff.refusal) == (3, "")
    assert [str(refusal) in record.message for record in caplog.records] == [True], "it is told once"


@pytest.mark.parametrize("refusal", SECRET_REFUSALS)
@pytest.mark.parametrize(
    ("changes", "exists"),
    [
        pytest.param({"container": RUNS}, True, id="a container that got the key runs"),
        pytest.param({"container": WAITS}, False, id="none has begun"),
        pytest.param({"container": RUNS, "key_secret": "another"}, False, id="it got another one"),
    ],
)
async def test_a_pod_that_runs_with_the_key_shows_a_new_operator_that_the_secret_exists(
    refusal: ApiError, changes: dict[str, Any], exists: bool
) -> None:
    secrets = Secrets()
    creation, name = with_keys(Creating(), secrets)
    secrets.answer = refusal
    one = pod(0, **{"key_secret": name, **changes})
    held = Job(job_body(), job(), 1, pods={one.uid: one})
    assert await creation.create_secret(held, [CreatePod(pid(1), 2)]) is exists
    assert (str(refusal) in creation.backoff.refusal) is not exists


async def test_a_secret_that_a_kubelet_misses_is_not_taken_for_there() -> None:
    secrets = Secrets()
    creation, name = with_keys(Creating(), secrets)
    runs, waits = pod(0, key_secret=name, container=RUNS), pod(1, key_secret=name, container=WAITS)
    problem = f'container train cannot start: secret "{name}" not found'
    waits = replace(waits, problem=problem, problem_reason=Reason.CONTAINER_CANNOT_START)
    secrets.answer = ApiError(403, "secrets is forbidden")
    held = Job(job_body(), job(), 1, pods={one.uid: one for one in (runs, waits)})
    assert not await creation.create_secret(held, [])
    assert "secrets is forbidden" in creation.backoff.refusal


async def test_what_cannot_be_placed_is_told_and_told_no_more_once_nothing_is_wanted(later: Later) -> None:
    creating = Creating()
    creating.told.problem = "the flavor asks for another node"
    await creating.decide(0)
    assert (creating.why, creating.told.woken, creating.api.tries) == ("the flavor asks for another node", 1, 0)
    later(7)
    await creating.decide()
    assert (creating.why, creating.told.woken) == ("", 1)


async def test_a_name_that_somebody_else_bears_is_told() -> None:
    creating = Creating()
    creating.api.answers = {pid(0).name("job"): ApiError(409, 'pods "job-workers-0" already exists')}
    await creating.decide(0, 1)
    assert "pod job-workers-0 exists and does not belong to this job" in creating.why


async def test_nothing_is_told_of_a_job_that_is_gone() -> None:
    creating = Creating()
    creating.api.answers = {pid(0).name("job"): ApiError(404, 'namespaces "team" not found')}
    creating.control.store.drop_job(JOB_UID)
    await creating.decide(0)
    assert (creating.told.failures, creating.told.woken) == ([], 0)


async def test_decisions_rest_for_a_while_when_pods_are_on_their_way_and_no_longer_than_these() -> None:
    creating = Creating()
    job_task = JobTask(creating.creation, PodDeletion(creating.control, JOB_UID))
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE_S):
        job_task.waits_until = loop.time() + 1000
        await job_task.wait_for_pod_calls()  # nothing is on its way
        creating.api.let.clear()
        decision = asyncio.create_task(creating.decide(0, 1))
        await until(lambda: creating.api.tries == 1)
        job_task.waits_until = loop.time() - 1
        await job_task.wait_for_pod_calls()  # it has been long enough
        job_task.waits_until = loop.time() + 1000
        rests = asyncio.create_task(job_task.wait_for_pod_calls())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not rests.done()
        creating.api.let.set()
        await rests
        await decision


async def test_a_job_that_is_refused_costs_few_calls_however_many_pods_it_wants(later: Later) -> None:
    creating = Creating()
    creating.api.answers = {pid(n).name("job"): ApiError(403, "exceeded quota: team") for n in range(5, 1000)}
    await creating.decide(*range(1000))
    assert (len(creating.api.made), creating.api.tries <= 5 + WRITE_PARALLEL) == (5, True)
    assert "more not tried: exceeded quota: team" in creating.why
    for tries in range(6, 9):
        before = creating.api.tries
        later(150)
        await creating.decide(*range(5, 1000))
        assert creating.api.tries == before + 1, tries


async def test_failures_now_and_then_do_not_slow_a_start_down_more_and_more(later: Later) -> None:
    """An API server that is busy refuses a call here and there; each ends a batch, of which most was done."""
    creating = Creating()
    for n in range(8):
        creating.api.answers = {pid(10 * n + 9).name("job"): ApiError(429, "too many requests")}
        await creating.decide(*range(10 * n, 10 * n + 10))
        assert len(creating.api.made) == 9 * (n + 1)
        later(0.3)  # the first wait is 0.2 s, and up to a quarter more; the eighth in a row would be 15 s
    creating.api.answers = {}
    await creating.decide(*(10 * n + 9 for n in range(8)))
    assert len(creating.api.made) == 80


async def test_a_name_that_is_taken_keeps_no_other_pod_from_being_made() -> None:
    creating = Creating()
    creating.api.answers = {pid(0).name("job"): ApiError(409, 'pods "job-workers-0" already exists')}
    await creating.decide(*range(4))
    assert len(creating.api.made) == 3
    assert "pod job-workers-0 exists and does not belong to this job" in creating.why


async def test_other_decisions_are_made_while_pods_are_created_and_none_is_made_twice(
    shell: Shell, decisions: Decisions
) -> None:
    shell.server.hold_pods.clear()
    shell.submit()
    await until(lambda: shell.server.calls.count(("POST", "pods")) == 1)
    for _ in range(3):
        await decide_again(shell, decisions)
    assert shell.server.pods == {}
    shell.server.hold_pods.set()
    await settled(shell)
    await decide_again(shell, decisions)
    assert shell.server.calls.count(("POST", "pods")) == 4


@pytest.mark.parametrize("change", ["suspended", "deleted"])
async def test_no_pod_comes_after_its_job_was_let_go(shell: Shell, decisions: Decisions, change: str) -> None:
    shell.server.hold_pods.clear()
    shell.submit()
    await until(lambda: shell.server.calls.count(("POST", "pods")) == 1)
    body = shell.server.jobs["job"]
    if change == "deleted":
        body["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:01Z"
    else:
        body["spec"]["runPolicy"] = {"suspend": True}
    made = len(decisions)
    shell.watch_shows(shell.server.put(shell.server.jobs, body))
    await until(lambda: len(decisions) > made)
    for _ in range(20):
        await asyncio.sleep(0)
    assert FINALIZER in shell.server.jobs["job"]["metadata"]["finalizers"], "nothing is done before they are answered"
    assert shell.state().get("reason") != "SuspendedByUser"
    shell.server.hold_pods.set()
    await until(
        lambda: shell.server.jobs == {} if change == "deleted" else shell.state()["reason"] == "SuspendedByUser"
    )
    await until(lambda: shell.server.pods == {})
    assert sum(call[0] == "DELETE" and call[1].startswith("job-workers") for call in shell.server.calls) == 1


async def test_what_waits_for_its_turn_is_withdrawn_when_another_operator_wrote_the_record(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = 40
    shell.server.hold_pods.clear()
    spec = job_body()["spec"]["replicaSpecs"][0]
    shell.submit(
        {"replicaSpecs": [{**spec, "maxReplicas": pods}], "elasticPolicy": {"minReplicas": 2, "maxReplicas": pods}}
    )
    await until(lambda: shell.server.calls.count(("POST", "pods")) == 1)
    creation = shell.reconciler._job_tasks[JOB_UID].creation
    last = CreatePod(pid(pods - 1), 2)
    assert creation.missing([last]) == []
    real, tries = shell.reconciler._reconcile._write_record, list[bool]()

    async def overtaken(made: Decision) -> None:
        tries.append(bool(creation.missing([last])))
        if len(tries) == 1:
            raise ApiError(409, "the object has been modified")
        await real(made)

    monkeypatch.setattr(shell.reconciler._reconcile, "_write_record", overtaken)
    shell.reconciler.wake(JOB_UID)
    await until(lambda: len(tries) >= 2)
    assert tries[:2] == [False, True], "withdrawn, and ordered again by the next decision"
    shell.server.hold_pods.set()
    await until(lambda: len(shell.server.pods) == pods)
    assert shell.server.calls.count(("POST", "pods")) == pods


async def test_a_value_that_was_edited_is_taken_from_the_pods_that_run() -> None:
    def spec(value: str) -> dict[str, Any]:
        container = {"name": "train", "env": [{"name": "LR", "value": value}]}
        return {"replicaSpecs": [{"name": "workers", "replicas": 4, "template": {"spec": {"containers": [container]}}}]}

    creating = Creating()
    annotations = {ANNOTATION_APPLIED: encode_applied(job_body(spec("1"))["spec"])}
    edited = Job(job_body(spec("2"), annotations=annotations), job(), 1)
    creating.api.there = [{"metadata": {"labels": {LABEL_SPEC: "workers"}}, **spec("1")["replicaSpecs"][0]["template"]}]
    await creating.creation.begin(edited, [CreatePod(pid(n), 4) for n in (2, 3)])
    await until(lambda: creating.creation.calls.is_idle)
    values = [
        e["value"] for m in creating.api.manifests for e in m["spec"]["containers"][0]["env"] if e["name"] == "LR"
    ]
    assert values == ["1", "1"], "those that run have it, too"
    assert creating.api.lists == 1, "once for all pods of a decision"
