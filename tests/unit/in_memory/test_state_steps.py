"""What `State` does in a step and between steps, in which order, with everything that it consists of played."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from elastipod import chaos
from elastipod.audit.sample_log import SampleLog
from elastipod.data import Batch, ElasticBatches
from elastipod.errors import StateDiffersError
from elastipod.in_memory import elastic_state
from elastipod.in_memory.agent_link import Fate
from elastipod.in_memory.elastic_state import State
from elastipod.in_memory.elastic_step import ElasticStep
from elastipod.in_memory.memory_state import WorldLost
from elastipod.in_memory.notary import Trained
from elastipod.rank_in_world import RankInWorld

PLAN = ElasticBatches(dataset_size=12, global_batch=4, seed=1)  # three steps


def batch_of(step: int = 3) -> Any:
    return mock.Mock(spec=Batch, step=step, samples_seen=40, global_size=8)


class Played:
    """A state of which every part is played; `parts.mock_calls` are their calls in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.parts = parts = mock.MagicMock()
        self.world, self.memory, self.durable, self.link = parts.world, parts.memory, parts.durable, parts.world.link
        self.world.place = mock.Mock(rank=1, world_size=2, generation=5)
        self.world.plan, self.world.donor, self.world.is_loaded = PLAN, 1, False
        self.world.reason_to_end = ""
        self.world.is_aborted = False
        self.world.outlives_generation, self.link.is_over, self.link.is_kept = True, False, False
        self.memory.rank.completed, self.memory.origin, self.memory.kind = 2, 4, "replicated"
        self.world.collective_of_library = self._collective
        self.in_collective = 0
        self.log, self.log_before = mock.Mock(spec=SampleLog), mock.Mock(spec=SampleLog)
        values: dict[str, Any] = {
            "_members": parts.members, "_world": self.world, "_memory": self.memory, "_durable": self.durable, "_limit": parts.limit,
            "_optimizers": mock.MagicMock(has_run=False, is_torn=False), "_chaos": parts.chaos, "_passes": parts.passes, "_apply": None,
            "_checkpoint_every": 0,
            "_sample_log": "folder", "_log_of_generation": self.log, "_seed": 7, "_checks_changes": True, "_is_first_step": False,
            "_is_second_step": False, "_trained": Trained(0),
            "_log_before": self.log_before, "_notary": None, "_buffers": parts.buffers, "_started": 0.0, "_step": None,
            "_has_finished": False, "_is_closed": False, "_pid": 0, **settings,
        }  # fmt: skip
        self.state: Any = object.__new__(State)
        self.state.__dict__.update(values)
        self.now = 100.0
        self.reports: list[Any] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(elastic_state, "report", lambda *told: self.reports.append(told))
        monkeypatch.setattr(elastic_state, "apply_gradients", parts.apply_gradients)
        monkeypatch.setattr(elastic_state, "unscale_gradients", parts.unscale_gradients)
        monkeypatch.setattr(chaos, "reached", parts.reached)
        monkeypatch.setattr(elastic_state, "seed_new_rank", parts.seed)
        monkeypatch.setattr(elastic_state, "SampleLog", parts.sample_log)
        monkeypatch.setattr(elastic_state, "Notary", parts.notary)

    @contextmanager
    def _collective(self) -> Iterator[None]:
        self.in_collective += 1
        yield
        self.in_collective -= 1

    def names(self) -> list[str]:
        return [name for name, _, _ in self.parts.mock_calls if not name.endswith("__")]


# ---- one step


@pytest.mark.parametrize(("is_first", "checks"), [(True, True), (True, False), (False, True)])
def test_a_step_begins_without_what_the_last_one_left(
    monkeypatch: pytest.MonkeyPatch, is_first: bool, checks: bool
) -> None:
    played, batch = Played(monkeypatch, _is_first_step=is_first, _checks_changes=checks), batch_of()
    played.state.begin_step(batch)
    assert played.names() == [
        "members.zero_grad",
        "buffers.begin",
        "seed",
        *["notary"] * (is_first and checks),
        *["passes.begin"] * is_first,
        "chaos.begin",
    ]
    assert played.parts.members.zero_grad.mock_calls == [mock.call(walks_modules=is_first)]
    assert played.parts.seed.mock_calls == [mock.call(3 + (7 << 40), 1)]
    if is_first and checks:
        assert played.parts.notary.mock_calls == [mock.call(played.parts.members.model, played.world.model, seed=3)]
        assert played.state._notary is played.parts.notary.return_value
    assert played.log.mock_calls == [mock.call.step(batch)]
    assert played.state._optimizers.mock_calls == [mock.call.begin(1, 3)]
    assert played.parts.chaos.mock_calls == [mock.call.begin(1, 3)]
    assert played.state._started == 100.0


@pytest.mark.parametrize(
    ("kind", "outlives", "begins"), [("replicated", True, True), ("sharded", True, False), ("replicated", False, False)]
)
def test_passes_are_watched_where_they_may_have_no_collective_and_this_process_can_go_on(
    monkeypatch: pytest.MonkeyPatch, kind: str, outlives: bool, begins: bool
) -> None:
    played = Played(monkeypatch, _is_first_step=True)
    played.memory.kind, played.world.outlives_generation = kind, outlives
    played.state.begin_step(batch_of())
    assert played.parts.passes.mock_calls == [mock.call.begin()] * begins


@pytest.mark.parametrize("is_aborted", [True, False])
@pytest.mark.parametrize("has_run", [True, False], ids=["by the script", "not yet"])
@pytest.mark.parametrize("where", ["in the block", "after it", "before any step"])
def test_a_step_cannot_count_once_the_world_is_gone_while_its_gradients_are_computed(
    monkeypatch: pytest.MonkeyPatch, is_aborted: bool, has_run: bool, where: str
) -> None:
    """Where the script has run its optimizer, the state before the step is gone, and what follows may need no other rank."""
    played = Played(monkeypatch)
    played.world.is_aborted, played.state._optimizers.has_run = is_aborted, has_run
    if where != "before any step":
        played.state._step = mock.Mock(is_open=where == "in the block")
    assert played.state._cannot_count() is (is_aborted and not has_run and where == "in the block")


@pytest.mark.parametrize("has_run", [False, True], ids=["by the library", "by the script"])
@pytest.mark.parametrize(("is_first", "checks"), [(True, True), (True, False), (False, True)])
def test_a_step_is_applied_once_and_committed_in_one_order(
    monkeypatch: pytest.MonkeyPatch, has_run: bool, is_first: bool, checks: bool
) -> None:
    played, step = (
        Played(monkeypatch, _is_first_step=is_first, _checks_changes=checks),
        mock.Mock(batch=batch_of(), loss=0.5),
    )
    played.state._optimizers.has_run = has_run
    played.state._started = 98.0
    played.state.commit_step(step)
    applied, compared = ["buffers.redo", "apply_gradients"] * (not has_run), ["memory.compare"] * (is_first and checks)
    unscaled, commit = ["unscale_gradients"] * (not has_run), ["memory.commit", "buffers.committed", "memory.copy"]
    assert played.names() == [
        "chaos.end", "world.await_gradients", "reached", *unscaled, "memory.prepare", *applied, *commit, *compared,
    ]  # fmt: skip
    assert played.parts.reached.mock_calls == [mock.call(chaos.Moment.BEFORE_APPLY, rank=1, step=3)]
    if compared:
        assert played.memory.compare.mock_calls == [mock.call(1, "after step 3, the first of this world,")]
    assert played.log.mock_calls == [mock.call.done(3, 0.5)]
    assert played.reports == [(3, 40, 0.5, 4.0, 3)]
    assert (played.state._is_first_step, step.is_done) == (False, True)
    watched = [each for each in played.state._optimizers.mock_calls if not each[0].endswith("__")]
    by_state = [mock.call.check_schedules(), mock.call.applying()] * (not has_run)
    committed = mock.call.committed(by_script=has_run, is_kept=True)
    assert watched == [mock.call.note_left_out(), *by_state, committed]
    ((apply,), _) = played.memory.prepare.call_args
    apply()
    assert played.parts.apply_gradients.call_count == 1 + (not has_run)


@pytest.mark.parametrize("has_unscaled", [True, False])
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_no_rank_is_prepared_before_the_ranks_have_agreed_whether_a_sharded_gradient_overflows(
    monkeypatch: pytest.MonkeyPatch, kind: str, has_unscaled: bool
) -> None:
    """An accelerator has only queued that collective when it returns."""
    played = Played(monkeypatch)
    played.memory.kind, played.parts.unscale_gradients.return_value = kind, has_unscaled
    played.state.commit_step(mock.Mock(batch=batch_of(), loss=0.5))
    again = ["world.await_gradients"] * (kind == "sharded" and has_unscaled)
    assert played.names()[:6] == [
        "chaos.end", "world.await_gradients", "reached", "unscale_gradients", *again, "memory.prepare", "buffers.redo",
    ][:6]  # fmt: skip


@pytest.mark.parametrize("what", ["copy", "compare"])
def test_a_step_is_done_though_the_world_is_lost_in_what_follows_its_commit(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    played = Played(monkeypatch, _is_first_step=True)
    played.world.is_lost_to = lambda error: isinstance(error, WorldLost)
    played.parts.notary.return_value.problems.return_value = []
    getattr(played.memory, what).side_effect = WorldLost("a peer")
    loop = played.state._train(PLAN, RankInWorld(0, 1), 1)
    step = next(loop)
    with step:
        pass
    assert (step.is_done, str(step.lost_to)) == (True, "a peer")
    assert played.reports == []
    with pytest.raises(WorldLost, match="a peer"):
        next(loop)


@pytest.mark.parametrize("has_wrap", [True, False])
def test_replicas_that_differ_without_a_wrapper_are_told_what_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, has_wrap: bool
) -> None:
    played = Played(monkeypatch, _is_first_step=True)
    played.world.has_wrap = has_wrap
    played.memory.compare.side_effect = StateDiffersError("the state of rank 1 differs")
    with pytest.raises(StateDiffersError) as caught:
        played.state.commit_step(mock.Mock(batch=batch_of(), loss=0.5))
    hint = "; State has no wrap=, so nothing may have reduced the gradients; pass wrap=DistributedDataParallel"
    assert str(caught.value) == f"the state of rank 1 differs{'' if has_wrap else hint}"


@pytest.mark.parametrize("checks", [True, False])
def test_members_that_may_differ_are_compared_in_the_second_step_of_a_world(
    monkeypatch: pytest.MonkeyPatch, checks: bool
) -> None:
    """Nobody waits for its end as for that of the first one."""
    played = Played(monkeypatch, _is_first_step=True, _checks_changes=checks)
    compare = played.parts.buffers.positions.compare_others
    called = []
    for _ in range(3):
        played.state.commit_step(mock.Mock(batch=batch_of(), loss=0.5))
        called.append(compare.call_count)
    assert called == [0, int(checks), int(checks)]
    assert compare.mock_calls == [mock.call(1)] * checks


def test_a_step_without_any_time_has_a_speed_and_one_without_a_log_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, _log_of_generation=None)
    played.state.begin_step(batch_of())
    played.state.commit_step(mock.Mock(batch=batch_of(), loss=None))
    assert played.reports == [(3, 40, None, 8 / 1e-9, 3)]


def test_the_scripts_own_apply_gets_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[Any] = []
    played = Played(monkeypatch, _apply=applied.append)
    played.state.commit_step(mock.Mock(batch=batch_of(), loss=None))
    assert applied == [played.state]
    assert played.parts.apply_gradients.mock_calls == []


@pytest.mark.parametrize("has_run", [True, False])
@pytest.mark.parametrize("problems", [[], ["a is wrong", "b too"]])
def test_a_first_step_with_problems_does_not_count_and_the_last_one_is_saved(
    monkeypatch: pytest.MonkeyPatch, has_run: bool, problems: list[str]
) -> None:
    notary = mock.Mock(samples=None)
    notary.problems.return_value = problems
    played, batch = Played(monkeypatch, _notary=notary), batch_of()
    played.state._optimizers.has_run = has_run
    if problems:
        said = "step 3, the first of generation 5, does not count: a is wrong; b too"
        with pytest.raises(StateDiffersError, match=said):
            played.state._check_gradients(batch)
    else:
        played.state._check_gradients(batch)
    assert notary.mock_calls == [mock.call.close(), mock.call.problems(batch, PLAN, 3 + (7 << 40), Trained(2))]
    is_saved = bool(problems) and not has_run
    saves = [mock.call(2, {"data": PLAN.state_dict(2)}, played.log, waits=True)] * is_saved
    assert played.durable.save.mock_calls == saves
    assert played.names() == ["buffers.restore", "durable.save"] * is_saved
    played.state._check_gradients(batch)
    assert notary.close.call_count == 1, "the next step has no notary"


@pytest.mark.parametrize(("step", "samples"), [(2, 40), (3, None)], ids=["it has trained it", "another step"])
def test_a_rank_remembers_the_samples_of_the_step_that_its_state_holds(
    monkeypatch: pytest.MonkeyPatch, step: int, samples: int | None
) -> None:
    notary = mock.Mock(samples=samples)
    notary.problems.return_value = ["a batch was skipped"]
    played = Played(monkeypatch)
    played.state.commit_step(mock.Mock(batch=batch_of(step), loss=None))
    played.state._notary = notary
    with pytest.raises(StateDiffersError, match="a batch was skipped"):
        played.state._check_gradients(batch_of())
    assert notary.problems.call_args.args[-1] == Trained(2, samples)
    data = PLAN.state_dict(2)
    assert played.durable.save.call_args.args[1] == {"data": {**data, "samples": samples or data["samples"]}}


# ---- between steps


class Loop:
    """Goes through the steps of one world."""

    def __init__(self, played: Played, *, stops: bool = False) -> None:
        self.played, self.stops, self.given = played, stops, [0][:0]
        self.in_collectives: list[int] = []

    def asks(self) -> bool:
        self.in_collectives.append(self.played.in_collective)
        return self.stops

    def run(self, after: Callable[[ElasticStep], None]) -> bool:
        """Give whether the loop is to end."""
        found: list[bool] = []

        def steps() -> Iterator[ElasticStep]:
            found.append((yield from self.played.state._train(PLAN, RankInWorld(0, 1), 1)))

        for step in steps():
            self.given.append(step.batch.step)
            step.is_done = True
            after(step)
        return found[0]


def nothing(_: ElasticStep) -> None:
    """Let the step be."""


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this rank told all others."""
    told: list[str] = []

    def all_texts(text: str) -> list[str]:
        told.append(text)
        return [text, "leave"] if text != "finished" else [text]

    monkeypatch.setattr(elastic_state, "all_texts", all_texts)
    return told


@pytest.mark.parametrize(("every", "saved"), [(0, []), (2, [(2, False)]), (1, [(1, False), (2, False), (3, False)])])
def test_a_world_ends_with_the_plan_and_a_save_that_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, texts: list[str], every: int, saved: list[tuple[int, bool]]
) -> None:
    played = Played(monkeypatch, _checkpoint_every=every)
    loop = Loop(played)
    monkeypatch.setattr(elastic_state, "elastic_event_detected", loop.asks)
    assert loop.run(nothing) is True
    assert (loop.given, texts, loop.in_collectives) == ([1, 2, 3], ["finished"], [1, 1, 1])
    saves = [mock.call(at, {"data": PLAN.state_dict(at)}, played.log, waits=waits) for at, waits in [*saved, (2, True)]]
    assert played.durable.save.mock_calls == saves
    assert played.log.mock_calls == [mock.call.end(2, "completed")]


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ("lost", WorldLost, "a peer"),
        ("not done", TypeError, r"the loop's body must be one block: `with step as batch:`"),
        ("over", WorldLost, "the agent has ended the generation"),
    ],
)
def test_what_ends_a_world_in_the_middle(
    monkeypatch: pytest.MonkeyPatch, how: str, error: type[Exception], said: str
) -> None:
    played = Played(monkeypatch, _checkpoint_every=1)
    loop = Loop(played)
    monkeypatch.setattr(elastic_state, "elastic_event_detected", loop.asks)

    def after(step: ElasticStep) -> None:
        if how == "lost":
            step.lost_to = RuntimeError("a peer")
        step.is_done = how != "not done"
        played.link.is_over = how == "over"

    with pytest.raises(error, match=said):
        loop.run(after)
    assert (loop.given, loop.in_collectives, played.durable.save.mock_calls) == ([1], [], [])


def test_without_an_agent_nobody_ends_a_world(monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> None:
    played = Played(monkeypatch, _durable=None, _log_of_generation=None)
    played.world.link = None
    loop = Loop(played)
    monkeypatch.setattr(elastic_state, "elastic_event_detected", loop.asks)
    assert loop.run(nothing) is True
    assert played.durable.save.mock_calls == []


@pytest.mark.parametrize("is_kept_whole", [True, False])
@pytest.mark.parametrize(("outlives", "has_link"), [(True, True), (False, True), (True, False)])
def test_a_planned_stop_saves_what_nobody_keeps_and_ends_a_process_that_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, texts: list[str], is_kept_whole: bool, outlives: bool, has_link: bool
) -> None:
    played = Played(monkeypatch)
    asked: list[bool] = []

    def own_fate(is_over: Callable[[], bool]) -> Fate:
        for played.link.is_over in (True, False):
            asked.append(is_over())
        return Fate.STAYS

    monkeypatch.setattr(elastic_state, "own_fate", own_fate)
    played.world.outlives_generation = outlives
    if not has_link:
        played.world.link = None
    played.memory.hand_over.return_value = is_kept_whole
    loop = Loop(played, stops=True)
    monkeypatch.setattr(elastic_state, "elastic_event_detected", loop.asks)
    assert loop.run(nothing) is not outlives
    is_known = outlives and has_link
    assert (loop.given, asked) == ([1], [True, False] * is_known)
    assert texts == [Fate.STAYS if is_known else Fate.UNKNOWN]
    assert played.memory.hand_over.mock_calls == [mock.call([Fate(texts[0]), Fate.LEAVES])]
    saves = [mock.call(1, {"data": PLAN.state_dict(1)}, played.log, waits=True)] * (not is_kept_whole)
    assert played.durable.save.mock_calls == saves
    if outlives:
        assert played.log.mock_calls == [mock.call.close()]
        assert played.world.leave.mock_calls == [mock.call(None, is_torn=False)]
    else:
        assert played.log.mock_calls == [mock.call.end(2, "drained")]
        assert played.world.leave.mock_calls == []
