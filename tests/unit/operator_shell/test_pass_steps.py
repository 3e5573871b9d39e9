"""Each step of a pass by itself: what is lost if it is left out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from tests.unit.agents.fake_agent import until
from tests.unit.core.builders import job, pod, trains
from tests.unit.kube.bodies import JOB_UID, job_body
from tests.unit.operator_shell.shells import Decisions, Shell
from tests.unit.operator_shell.test_reconciler_order import RECORD, Notes, carried_out, decided, decision, job_task_of

from elastipod_operator import clock, reconcile_pass
from elastipod_operator.agents.command_builder import CommandBuilder
from elastipod_operator.agents.commands import Command
from elastipod_operator.agents.polled_agent import Address
from elastipod_operator.core.actions import (
    CreatePod,
    DeleteJob,
    JobEvent,
    ListPods,
    Plan,
    PrepareWorkers,
    StartWorkers,
    StopWorkers,
)
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import Record
from elastipod_operator.core.snapshot import ContainerState, ObservedAgent, ObservedContainer, ObservedPod, Snapshot
from elastipod_operator.job_agents import JobAgents
from elastipod_operator.job_task import JobTask
from elastipod_operator.kube.api import ApiError
from elastipod_operator.kube.job_keys import JobKeys
from elastipod_operator.kube.store import Job
from elastipod_operator.reconciler import FIRST_RETRY_S, LAST_RETRY_S

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


class Statuses:
    """The cache of the agents' answers: which pods are polled where, and since how many restarts."""

    def __init__(self) -> None:
        self.polled: dict[str, Address] = {}
        self.stopped: list[str] = []

    def watches(self, uid: str, ip: str, port: int, restarts: int) -> bool:
        known = self.polled.get(uid)
        return known is not None and (known.ip, known.port, known.restarts) == (ip, port, restarts)

    def watch(self, uid: str, address: Address) -> None:
        assert not self.watches(uid, address.ip, address.port, address.restarts), "it is polled there already"
        self.polled[uid] = address

    def stop_polling(self, uid: str) -> None:
        self.stopped.append(uid)
        self.polled.pop(uid, None)

    def fact(self, uid: str) -> ObservedAgent:
        return ObservedAgent(generation=3)


def job_with(*pods: ObservedPod) -> Job:
    """A job of the record that all of these use, with these pods."""
    return Job(job_body(), job(RECORD), 10, pods={one.uid: one for one in pods})


def agents_with(statuses: Statuses) -> JobAgents:
    """The part of the shell that polls and calls agents, over this cache."""
    return JobAgents(lambda wake: (cast(Any, statuses), cast(Any, Notes())), lambda uid: None, JobKeys())


def test_agents_are_polled_while_their_containers_run_and_no_longer() -> None:
    statuses = Statuses()
    agents, first = agents_with(statuses), pod(0)
    agents.follow(job_with(first, pod(1)))
    assert set(statuses.polled) == {first.uid, pod(1).uid}
    agents.follow(job_with(first, pod(1)))
    for ended in (
        replace(first, phase="Succeeded"),
        replace(first, container=ObservedContainer(ContainerState.TERMINATED, exit_code=0)),
    ):
        statuses.stopped.clear()
        agents.follow(job_with(ended, pod(1)))
        assert statuses.stopped == [first.uid]
        assert set(statuses.polled) == {pod(1).uid}
        agents.follow(job_with(first, pod(1)))
        assert first.uid in statuses.polled, "a container that runs again has an agent again"


def test_a_container_that_was_restarted_has_a_new_agent() -> None:
    statuses = Statuses()
    agents, first = agents_with(statuses), pod(0)
    agents.follow(job_with(first))
    agents.follow(job_with(replace(first, container=ObservedContainer(ContainerState.RUNNING, restart_count=2))))
    assert statuses.polled[first.uid].restarts == 2


def at_port(port: int, *pods: ObservedPod) -> Job:
    """The job with its agentPort edited."""
    found = job_with(*pods)
    assert found.fact.policy is not None
    found.fact = replace(found.fact, policy=replace(found.fact.policy, agent_port=port))
    return found


def test_agents_are_reached_where_they_listen_after_the_jobs_port_was_edited() -> None:
    """Only the agents of new pods listen at the new port."""
    statuses = Statuses()
    agents, old, new, other = agents_with(statuses), pod(0), pod(1), pod(2)
    old, new = replace(old, agent_port=7000), replace(new, agent_port=9000)
    agents.follow(at_port(7000, old))
    polled = statuses.polled[old.uid]
    agents.follow(at_port(9000, old, new, other))
    assert statuses.polled[old.uid] is polled
    assert {uid: address.port for uid, address in statuses.polled.items()} == {
        old.uid: 7000, new.uid: 9000, other.uid: 9000
    }, "where a pod does not say it, the job does"  # fmt: skip
    edited = at_port(9000, old, new)
    record = replace(RECORD, members=(old.id, new.id), agents_serve_store=True)
    builder = agents.command_builder(edited, record)
    assert builder is not None
    call = builder.build(PrepareWorkers(new.name))
    assert call is not None
    assert call.body is not None
    assert (call.address.port, call.body["store_port"]) == (9000, 7000)


@pytest.mark.parametrize("changes", [{"ip": ""}, {"started": False}])
def test_a_pod_that_has_no_agent_yet_is_not_polled(changes: dict[str, Any]) -> None:
    statuses = Statuses()
    agents_with(statuses).follow(job_with(replace(pod(0), **changes)))
    assert (statuses.polled, statuses.stopped) == ({}, [])


class Lists(Notes):
    """An API server that also lists pods and deletes the job."""

    async def list_pods(self, namespace: str, uid: str) -> tuple[list[Mapping[str, Any]], str]:
        self.done.append("list pods")
        return [], "11"

    async def delete_job(self, fact: object) -> dict[str, Any]:
        self.done.append("delete the job")
        return job_body()


async def test_pods_are_listed_again_when_a_decision_asks_for_it() -> None:
    assert await carried_out(Lists(), decided(ListPods())) == ["list pods"]
    assert await carried_out(Lists(), decided()) == []


async def test_a_job_is_deleted_when_a_decision_asks_for_it() -> None:
    assert await carried_out(Lists(), decided(DeleteJob())) == ["delete the job"]


@pytest.mark.parametrize("is_refused", [False, True])
async def test_pods_are_supplied_once_the_status_is_written_or_refused(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    """Many calls for pods at once would delay it, and a status that cannot be written must not keep pods away."""
    done, steps = list[str](), shell.reconciler._reconcile

    async def report(job: Job, todo: Plan) -> None:
        await asyncio.sleep(0.01)
        done.append("status")
        if is_refused:
            raise ApiError(422, "Invalid value")

    async def supply(*_: Any, **__: Any) -> None:
        done.append("pods")

    monkeypatch.setattr(steps, "_report", report)
    monkeypatch.setattr(steps, "_supply", supply)
    made, job_task = decision(decided()), job_task_of(shell.reconciler)
    ends = steps._report_and_supply(made.job, job_task, made, [], may_create=True)
    (error,) = await asyncio.gather(ends, return_exceptions=True)
    assert done == ["status", "pods"]
    assert isinstance(error, ApiError) is is_refused


@pytest.mark.parametrize("waits", [True, False])
async def test_a_status_that_waits_keeps_no_event_of_the_decision_back(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    written, recorded, steps = list[Plan](), list[JobEvent](), shell.reconciler._reconcile

    async def write(job: Job, todo: Plan) -> None:
        written.append(todo)

    monkeypatch.setattr(steps, "_write_status", write)
    monkeypatch.setattr(steps, "_record_events", lambda job, events: recorded.extend(events))
    event = JobEvent(Reason.RESIZED, "2 -> 4")
    todo = replace(decided(), events=(event,), status_waits=waits)
    await steps._report(decision(todo).job, todo)
    assert written == ([] if waits else [todo])
    assert recorded == [event]


class FedByHand:
    """A job task of a shell whose passes end as the test says."""

    def __init__(self, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shell = shell
        self.outcomes: list[Exception | None] = []
        self.dues: list[datetime | None] = []
        self.num_waits = 0
        self._wait = clock.wait
        monkeypatch.setattr(shell.reconciler._reconcile, "run", self.run)
        monkeypatch.setattr(clock, "wait", self.wait)

    async def wait(self, wake: asyncio.Event, due: datetime | None) -> None:
        task = self.shell.reconciler._job_tasks.get(JOB_UID)
        if task is not None and task.wake is wake:
            self.num_waits += 1
        await self._wait(wake, due)

    async def run(self, job: Job, job_task: JobTask) -> datetime | None:
        self.dues.append(job_task.due)
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return None

    async def next_pass(self, outcome: Exception | None) -> float | None:
        """Let one pass end like this; gives how long the task waits then, None for as long as nothing happens."""
        num_waits = self.num_waits
        self.outcomes.append(outcome)
        self.shell.reconciler.wake(JOB_UID)
        await until(lambda: not self.outcomes and self.num_waits > num_waits)  # a failed pass is reported first
        due = self.shell.reconciler._job_tasks[JOB_UID].due
        return None if due is None else (due - clock.now()).total_seconds()


async def test_a_failed_pass_is_repeated_later_each_time_and_soon_again_after_a_good_one(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "now", lambda: NOW)
    passes, broken = FedByHand(shell, monkeypatch), ApiError(500, "out of order")
    passes.outcomes.append(None)
    shell.submit()
    await until(lambda: passes.num_waits > 1)
    waits = [await passes.next_pass(outcome) for outcome in (broken, broken, broken, None, broken)]
    assert waits == pytest.approx([FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S, None, FIRST_RETRY_S])
    for _ in range(8):
        longest = await passes.next_pass(broken)
    assert longest == pytest.approx(LAST_RETRY_S)


async def test_a_pass_that_fails_by_a_mistake_of_the_operator_is_repeated_last(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "now", lambda: NOW)
    passes = FedByHand(shell, monkeypatch)
    passes.outcomes.append(None)
    shell.submit()
    await until(lambda: passes.num_waits > 1)
    assert await passes.next_pass(KeyError("a mistake")) == pytest.approx(LAST_RETRY_S)


@pytest.mark.parametrize(
    ("wake_in_s", "has_calls", "due_in_s"),
    [(None, False, None), (60, False, 60), (None, True, 1), (60, True, 1), (0.5, True, 0.5)],
)
async def test_after_calls_to_agents_the_job_is_looked_at_again_soon(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, wake_in_s: float | None, has_calls: bool, due_in_s: float | None
) -> None:
    """A call that failed is repeated by that pass."""
    monkeypatch.setattr(clock, "now", lambda: NOW)
    wake_at = None if wake_in_s is None else NOW + timedelta(seconds=wake_in_s)
    actions = [StartWorkers(pod(0).name, 0)] if has_calls else []
    planned: Plan = replace(decided(*actions), wake_at=wake_at)
    monkeypatch.setattr(reconcile_pass, "plan", lambda observed: planned)
    sent: list[Command] = []

    async def send(commands: list[Command]) -> list[str]:
        sent.extend(commands)
        return []

    monkeypatch.setattr(shell.reconciler._agents, "_sender", type("Sender", (), {"send": staticmethod(send)})())
    shell.server.put(shell.server.jobs, job_body())
    held = Job(shell.server.jobs["job"], job(RECORD), 10, pods={pod(0).uid: pod(0)}, listed=True)
    due = await shell.reconciler._reconcile.run(held, job_task_of(shell.reconciler))
    assert due == (None if due_in_s is None else NOW + timedelta(seconds=due_in_s))
    assert [command.path for command in sent] == (["/start"] if has_calls else [])


async def test_the_record_is_written_before_any_agent_is_called_or_pod_supplied(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes over after a death in between must find what was begun."""
    done, steps = list[str](), shell.reconciler._reconcile

    def note(what: str) -> Callable[..., Any]:
        async def step(*_: object, **__: object) -> None:
            await asyncio.sleep(0.01)
            done.append(what)

        return step

    for name in ("_write_record", "_report", "_supply"):
        monkeypatch.setattr(steps, name, note(name))
    monkeypatch.setattr(shell.reconciler._agents, "send", note("calls"))
    monkeypatch.setattr(reconcile_pass, "plan", lambda observed: decided(StartWorkers(pod(0).name, 0)))
    shell.server.put(shell.server.jobs, job_body())
    held = Job(shell.server.jobs["job"], job(RECORD), 10, pods={pod(0).uid: pod(0)}, listed=True)
    await steps.run(held, job_task_of(shell.reconciler))
    assert done[0] == "_write_record"
    assert sorted(done[1:]) == ["_report", "_supply", "calls"], "these go on at the same time"


@pytest.mark.parametrize("utc_s", [0.9, 1.0, 1.1], ids=["UTC slower", "alike", "UTC faster"])
async def test_a_refusal_is_told_until_its_retry_whatever_the_clocks_say(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, utc_s: float
) -> None:
    """The back-off ends by the clock of timers. UTC differs from it while a correction of the machine's clock is applied."""
    passed, orders = [0.0], list[int]()
    monkeypatch.setattr(clock, "steady", lambda: 1000 + passed[0])
    monkeypatch.setattr(clock, "now", lambda: NOW + timedelta(seconds=passed[0] * utc_s))

    def wants_a_pod(observed: Snapshot) -> Plan:
        at = observed.pod_creation_retry_at
        is_due = at is None or at <= observed.now
        return decided(CreatePod(pod(0).id, 1)) if is_due else decided()

    async def place(_: Job, actions: Sequence[CreatePod]) -> Any:
        orders.append(len(actions))
        return [], ""

    monkeypatch.setattr(reconcile_pass, "plan", wants_a_pod)
    shell.reconciler._control = replace(shell.reconciler._control, place=place)
    shell.server.put(shell.server.jobs, job_body())
    held = Job(shell.server.jobs["job"], job(RECORD), 10, listed=True)
    job_task = job_task_of(shell.reconciler)
    wait_s = job_task.creation.backoff.note_refusal("exceeded quota", JOB_UID)
    for passed[0] in (0.1, wait_s - 0.01, wait_s):
        assert (orders, job_task.creation.backoff.refusal) == ([], "exceeded quota"), passed
        await shell.reconciler._reconcile.run(held, job_task)
    assert orders == [1], "a timer wakes for the retry, and nothing else does"


async def test_a_back_off_that_ends_during_a_pass_does_not_end_the_refusal(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = [0.0]
    monkeypatch.setattr(clock, "steady", lambda: 1000 + passed[0])
    shell.server.put(shell.server.jobs, job_body())
    held = Job(shell.server.jobs["job"], job(RECORD), 10, listed=True)
    job_task = job_task_of(shell.reconciler)
    wait_s = job_task.creation.backoff.note_refusal("exceeded quota", JOB_UID)

    def passes_by(_: Snapshot) -> Plan:
        passed[0] = wait_s + 1
        return decided()

    monkeypatch.setattr(reconcile_pass, "plan", passes_by)
    await shell.reconciler._reconcile.run(held, job_task)
    assert job_task.creation.backoff.refusal == "exceeded quota", "the next plan tells whether it still holds"
    await shell.reconciler._reconcile.run(held, job_task)
    assert job_task.creation.backoff.refusal == ""


def test_a_command_of_another_generation_is_another_command() -> None:
    """The sender sends equal commands once while they take effect; see test_commands.py."""

    def key(generation: int, *, graceful: bool = True, record: Record = RECORD) -> tuple[object, ...]:
        builder = CommandBuilder(
            {}, {pod(0).name: pod(0)}, record, cast(Any, Statuses()), lambda one: Address("job", one.ip, 8080)
        )
        built = builder.build(StopWorkers(pod(0).name, generation, graceful=graceful, timeout_s=9))
        assert built is not None
        return built.key

    assert key(3) == key(3)
    assert len({key(3), key(4), key(3, graceful=False)}) == 3
    starts = set()
    for generation in (3, 4):
        builder = CommandBuilder(
            {}, {pod(0).name: pod(0)}, trains(generation=generation), cast(Any, _NoProgress()),
            lambda one: Address("job", one.ip, 8080),
        )  # fmt: skip
        built = builder.build(StartWorkers(pod(0).name, 0))
        assert built is not None
        starts.add(built.key)
    assert len(starts) == 2


class _NoProgress(Statuses):
    def progress(self, uids: object, generation: int = 0) -> dict[str, Any]:
        return {}

    def worker_data(self, uids: object) -> None:
        return None


async def test_queues_and_spare_capacity_are_read_before_a_decision(
    shell: Shell, decisions: Decisions, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, int]] = []
    steps = shell.reconciler._reconcile
    follow = steps.agents.follow

    def note(what: str) -> Callable[..., Any]:
        async def read(*_: object) -> None:
            done.append((what, len(decisions)))

        return read

    def followed(job: Job) -> None:
        done.append(("agents", len(decisions)))
        follow(job)

    monkeypatch.setattr(steps.queues, "observe", note("queues"))
    monkeypatch.setattr(steps.spare_capacity, "observe", note("spare capacity"))
    monkeypatch.setattr(steps.agents, "follow", followed)
    shell.submit()
    await until(lambda: len(decisions) >= 1)
    assert done[:3] == [("queues", 0), ("spare capacity", 0), ("agents", 0)]
