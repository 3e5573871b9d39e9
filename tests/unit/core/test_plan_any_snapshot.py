"""Whatever is observed, likely or not: a plan comes of it, it can be written, and it breaks no rule."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.core.builders import NOW, job, observed, pid, pod, policy
from tests.unit.core.test_wording import disagreements

from elastipod_operator.core.actions import CreatePod, StartWorkers, StopWorkers
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import (
    Depth,
    FaultyReplica,
    NextGeneration,
    NodeFaults,
    PartialGang,
    Record,
    RestartMode,
    RestartWindow,
    Transition,
    TransitionKind,
)
from elastipod_operator.core.record_codec import decode, encode
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import AgentState, Failure, ObservedAgent, ObservedNode, ObservedPod, Snapshot

times = st.sampled_from([0, 1, 10, 20, 40, 100, 1000]).map(lambda s: NOW - timedelta(seconds=s))
maybe_times = st.none() | times
ids = st.builds(pid, st.integers(0, 3), st.integers(0, 2))
agents = st.builds(
    ObservedAgent,
    state=st.none() | st.sampled_from(AgentState),
    generation=st.none() | st.integers(0, 4),
    drained=st.booleans(),
    terminating=st.booleans(),
    failure=st.none() | st.just(Failure(0, 1, "", "boom")),
    step=st.none() | st.integers(0, 9),
    step_at=maybe_times,
    step_pace=st.none() | st.just(timedelta(seconds=2)),
    trying_since=maybe_times,
    last_answer=maybe_times,
    answering_since=maybe_times,
    restart_mode=st.sampled_from(["", *RestartMode, "another"]),
    saving=st.booleans(),
    no_drain_handler=st.booleans(),
    memory_state=st.sampled_from(["", "replicated", "sharded"]),
    num_kept=st.none() | st.integers(0, 1),
    can_begin_next=st.booleans(),
    next_generation=st.none() | st.integers(0, 4),
    generation_at=maybe_times,
)
pods = st.builds(
    pod, ids, phase=st.sampled_from(["Pending", "Running", "Failed", "Succeeded"]), node=st.sampled_from(["", "a", "b", "lost"]),
    started=st.booleans(), kill_at=maybe_times, disruption=st.sampled_from(["", "Eviction"]),
)  # fmt: skip
nodes = st.builds(
    ObservedNode, name=st.sampled_from(["a", "b"]), ready=st.booleans(), not_ready_since=maybe_times, cordoned=st.booleans(),
    out_of_service=st.booleans(), disruption=st.sampled_from(["", "taint"]),
)  # fmt: skip
transitions = st.builds(
    Transition,
    kind=st.sampled_from(
        [TransitionKind.START, TransitionKind.RESIZE, TransitionKind.RECOVERY, TransitionKind.SUSPEND]
    ),
    cause=st.just("C"),
    message=st.just("m"),
    from_size=st.integers(0, 4),
    target_size=st.integers(0, 4),
    began_at=times,
    detected_at=times,
    deadline=times,
    graceful=st.booleans(),
    not_before=maybe_times,
    uses_budget=st.booleans(),
    is_budget_checked=st.booleans(),
    recreates_pods=st.booleans(),
    reach=st.sampled_from(RestartMode),
    depth=st.sampled_from(Depth),
    leavers=st.none() | st.lists(ids, unique=True, max_size=2).map(tuple),
    next_generation=st.none()
    | st.builds(
        NextGeneration,
        generation=st.integers(0, 6),
        members=st.lists(ids, unique=True, max_size=4).map(tuple),
        master_addr=st.just("10.0.0.0"),
        agents_serve_store=st.booleans(),
    ),
)
records = st.builds(
    Record,
    generation=st.integers(0, 4),
    members=st.lists(ids, unique=True, max_size=4).map(tuple),
    transition=st.none() | transitions,
    lost=st.lists(ids, unique=True, max_size=2).map(tuple),
    window_since=maybe_times,
    running_since=maybe_times,
    started_at=maybe_times,
    fault_at=maybe_times,
    retries=st.integers(0, 2),
    window=st.builds(RestartWindow, st.integers(0, 2), maybe_times, st.integers(0, 3), st.integers(0, 2)),
    stalled_recoveries=st.integers(0, 4),
    gang=st.none() | st.builds(PartialGang, times, st.integers(0, 3), st.integers(0, 3), maybe_times),
    size_before_growth=st.integers(0, 2),
    faulty_replicas=st.lists(
        st.builds(FaultyReplica, ids, st.integers(-1, 3), st.sampled_from(["", "a"])), max_size=2
    ).map(tuple),
    node_faults=st.lists(st.builds(NodeFaults, st.sampled_from("abc"), st.integers(1, 3), times), max_size=2).map(
        tuple
    ),
    outcome=st.sampled_from(["", "", "", "Completed"]),
)
wishes = st.builds(
    policy, sizes=st.sampled_from([Sizes((1,), 1), Sizes((2, 4), 2), Sizes((1, 2, 3), 2)]), suspend=st.booleans(),
    restarts_before_full=st.none() | st.integers(0, 1), max_full_restarts=st.none() | st.integers(0, 1),
    max_offenders=st.integers(0, 1), max_retries=st.none() | st.integers(0, 1), fault_deadline=st.none() | st.just(timedelta(seconds=30)),
)  # fmt: skip


@st.composite
def observations(draw: st.DrawFn) -> Snapshot:
    """Give facts that need not go together."""
    present: dict[str, ObservedPod] = {p.name: p for p in draw(st.lists(pods, max_size=6))}
    found = {name: draw(agents) for name in present}
    fact = job(
        draw(st.none() | records),
        draw(wishes),
        deleting_since=draw(st.none() | times),
        drain_on_delete=draw(st.booleans()),
    )
    if draw(st.integers(0, 9)) == 0:
        fact = replace(fact, policy=None, spec_error="no")
    snapshot = observed(fact, [(p, found[p.name]) for p in present.values()])
    known = {node.name: node for node in draw(st.lists(nodes, max_size=2))}
    return replace(snapshot, nodes=known, pods_listed_at=draw(maybe_times))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(observations())
def test_a_plan_comes_of_it_that_breaks_no_rule(snapshot: Snapshot) -> None:
    todo = plan(snapshot)
    before, after, wanted = snapshot.job.record or Record(), todo.record, snapshot.job.policy
    assert decode(encode(after)) == after
    assert after.generation >= before.generation
    assert todo.conditions
    for text in [*(c.message for c in todo.conditions), *(e.message for e in todo.events)]:
        assert disagreements(text) == []
    assert todo.conditions[-1].type not in ("Scaling", "PodsReady", "Warning")
    if after.generation > before.generation and after.members != before.members and todo.history:
        assert wanted is not None
        assert len(after.members) in wanted.sizes.allowed
        assert not set(after.members) & set(before.lost)
        assert [e.generation for e in todo.history] == [after.generation]
    for action in todo.actions:
        if isinstance(action, StartWorkers):
            agent = snapshot.agents[action.pod]
            assert agent.state in (AgentState.READY, AgentState.INIT)
            assert [p.name for p in snapshot.pods if p.id == after.members[action.group_rank]] == [action.pod]
        elif isinstance(action, StopWorkers) and action.graceful:
            leaving = snapshot.job.deleting_since is not None
            assert leaving or after.transition is not None, "asked for a checkpoint, but not on record"
        elif isinstance(action, CreatePod):
            assert action.pod not in {p.id for p in snapshot.pods}
            assert len(action.avoids) <= wanted.max_offenders if wanted else not action.avoids
            assert not after.outcome
            assert snapshot.job.deleting_since is None


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(observations())
def test_an_incident_is_booked_once_however_often_it_is_looked_at(snapshot: Snapshot) -> None:
    before = snapshot.job.record or Record()
    first = plan(snapshot)
    if first.record.restarts == before.restarts or first.record.generation > before.generation:
        return
    again = plan(replace(snapshot, job=replace(snapshot.job, record=first.record)))
    assert (again.record.restarts, again.record.retries) == (first.record.restarts, first.record.retries)
    if first.record.transition is not None and first.record.transition.is_budget_checked:
        assert again.record.window == first.record.window
