"""What ranks agree on before a copy, which objects are refused, what a resume says, and how lost ranks are found."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.free_ports import free_port
from tests.unit.checkpoint.trainer import Trainer
from tests.unit.in_memory.forked_ranks import raised_by, run_ranks, world

from elastipod.checkpoint import CheckpointManager, communicator
from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.image_inventory import ImageInfo, ImageInventory
from elastipod.checkpoint.live_objects import LiveObjects
from elastipod.checkpoint.manifest import CheckpointId, DamagedCheckpoint
from elastipod.checkpoint.optimizer_state import optimizer_state
from elastipod.checkpoint.restore import Restore
from elastipod.checkpoint.resumer import Resumer
from elastipod.checkpoint.save_arguments import check_steps
from elastipod.checkpoint.staging import _common
from elastipod.checkpoint.state_keys import StateKeys, describe_missing_keys
from elastipod.errors import CheckpointError

OF = CheckpointId(1, 1)


# -- what ranks agree on -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "common", "connects"),
    [
        ([[True, True, None, False, 0]], [True, None, 0], False),
        (
            [[True, True, [3, 1], True, 4], [True, False, [4, 0], True, 5], [False, True, None, True, 4]],
            [False, [4, 0], 5],
            True,
        ),
    ],
)
def test_before_a_copy_all_are_asked(answers: list[list[Any]], common: list[Any], connects: bool) -> None:
    first, second = _common(answers), _common(answers)
    assert [first[0], *first[2:]] == common
    assert (len(first[1]) == 16) == connects, "where a rank has no connections, new ones have a name"
    assert (first[1] != second[1]) == connects, "which no others have had"


def test_only_some_ranks_with_a_log_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"^sample_log was passed on rank 0 and not on rank 1; pass one"):
        _common([[True, True, None, True, 0], [True, True, None, False, 0]])


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([100, 99], "step 100 on rank 0 and 99 on rank 1"),
        ([7, 8, 7, 9, 8], "step 7 on ranks 0,2, 8 on ranks 1,4 and 9 on rank 3"),
        ([1, 2, 3, 4, 5], "step 1 on rank 0, 2 on rank 1, 3 on rank 2 and others on ranks 3-4"),
    ],
)
def test_ranks_that_save_different_steps_are_told(steps: list[int], told: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        check_steps(steps)
    assert str(raised.value) == f"save was called with {told}; pass the same number of completed steps on every rank"


@pytest.mark.parametrize("call", ["save", "save_async"])
def test_a_rank_that_repeats_its_last_step_while_another_saves_a_new_one_is_refused_on_both(
    tmp_path: Path, call: str
) -> None:
    port = free_port()

    def body(rank: int) -> Any:
        with world(rank, 2, port):
            run = Trainer()
            live: dict[str, Any] = {"model": run.model, "optimizer": run.optimizer}
            with CheckpointManager(tmp_path, memory=False) as manager:
                manager.save(98, **live)
                told = raised_by(lambda: getattr(manager, call)(98 + rank, **live))
                manager.save(100, **live)
                return told

    said = (
        "save was called with step 98 on rank 0 and 99 on rank 1; pass the same number of completed steps on every rank"
    )
    assert run_ranks(2, body) == [["CheckpointError", said]] * 2
    assert [each.step for each in DirectoryStore(tmp_path).list_complete()] == [100, 98]


@pytest.mark.parametrize("memory", [False, True], ids=["storage alone", "memory"])
def test_both_ranks_refuse_to_save_different_steps_and_can_save_afterwards(tmp_path: Path, *, memory: bool) -> None:
    port = free_port()

    def body(rank: int) -> Any:
        with world(rank, 2, port):
            run = Trainer()
            with CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory" if memory else False) as manager:
                run.save(manager, 98)
                told = raised_by(lambda: run.save(manager, 100 - rank))
                run.save(manager, 100)
                return told

    said = "save was called with step 100 on rank 0 and 99 on rank 1; pass the same number of completed steps on every rank"
    for told in run_ranks(2, body):
        assert said in str(told)
    assert [each.step for each in DirectoryStore(tmp_path / "disk").list_complete()] == [100, 98]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({0: "ab", 1: "ab"}, None),
        ({0: "abc", 1: "a"}, "rank 1 lacks b, c, which rank 0 has"),
        ({0: "a", 1: "abcdef", 2: "a", 3: "abcdef"}, "ranks 0,2 lack b, c, d and 2 more, which ranks 1,3 have"),
        ({0: "ab", 1: "ac", 2: "abc"}, "rank 1 lacks b, which ranks 0,2 have"),
        ({0: "abcd", 1: "a"}, "rank 1 lacks b, c, d, which rank 0 has"),
    ],
)
def test_which_ranks_lack_which_keys(keys: dict[int, str], told: str | None) -> None:
    found = describe_missing_keys({rank: StateKeys(frozenset(own), frozenset()) for rank, own in keys.items()})
    assert found == (
        told
        and f"this state cannot be saved: {told}; for stages of a pipeline pass CheckpointManager(..., mesh=), other parts "
        "that only some ranks have are not supported"
    )


@pytest.mark.parametrize(
    ("given", "kind", "told"),
    [
        (lambda m, o: (5, o), TypeError, "model is a int; give one torch Module, a sequence, or a mapping by name"),
        (lambda m, o: ({}, o), TypeError, "model is empty; give one torch Module, a sequence, or a mapping by name"),
        (lambda m, o: ({"a.b": m}, o), ValueError, "model has the name 'a.b'; a name is a text without dots"),
        (lambda m, o: ({"": m}, o), ValueError, "model has the name ''; a name is a text without dots"),
        (lambda m, o: ({1: m}, o), ValueError, "model has the name 1; a name is a text without dots"),
        (
            lambda m, o: ([m, 3], o), TypeError,
            "model['1'] is a int; give one torch Module, a sequence, or a mapping by name",
        ),
        (lambda m, o: (m, "x"), TypeError, "optimizer is a str; give one torch Optimizer, a sequence, or a mapping by name"),
        (
            lambda m, o: (m, o, 4), TypeError,
            "scheduler is a int; give one object with state_dict and load_state_dict, a sequence, or a mapping by name",
        ),
        (lambda m, o: (m, o, None, [m]), TypeError, 'stateful is a list; give names, as in stateful={"scaler": scaler}'),
        (
            lambda m, o: (m, o, None, {"x": 3}), TypeError,
            "stateful['x'] is a int; each is one object with state_dict and load_state_dict",
        ),
        (
            lambda m, o: (m, {"a": o, "b": torch.optim.SGD([m.bias])}), CheckpointError,
            "the optimizers 'a' and 'b' have a parameter of shape [2] in common; give each parameter to one of them",
        ),
    ],
)  # fmt: skip
def test_what_is_no_part_of_a_training_is_refused(given: Any, kind: type[Exception], told: str) -> None:
    model = torch.nn.Linear(3, 2)
    with pytest.raises(kind) as raised:
        LiveObjects.of(*given(model, torch.optim.SGD(model.parameters())))
    assert str(raised.value) == told


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    with pytest.raises(CheckpointError) as raised:
        optimizer_state(LiveObjects.of(model, torch.optim.SGD([model.weight, *other.parameters()])))
    assert str(raised.value) == (
        "2 parameters of the optimizer are not the model's; make the optimizer from model.parameters(), after the model was sharded "
        "(fully_shard) or otherwise given new parameters"
    )
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state["extra"] = {"x": 1}  # type: ignore[index]
    with pytest.raises(CheckpointError) as raised:
        optimizer_state(LiveObjects.of(model, optimizer))
    assert str(raised.value) == "the optimizer keeps state under 'extra', which is no parameter of the model"


@pytest.mark.parametrize(
    ("missing", "unexpected", "told"),
    [
        ((), (), ""),
        (("a",), (), "it has no a, which stays as it is"),
        ((), ("b", "c"), "its b, c is not loaded"),
        (("a",), ("b",), "it has no a, which stays as it is; its b is not loaded"),
    ],
)
def test_what_was_not_loaded_is_told(missing: tuple[str, ...], unexpected: tuple[str, ...], told: str) -> None:
    model = torch.nn.Linear(3, 2)
    restore = Restore(LiveObjects.of_models(model))
    assert (restore.missing, restore.unexpected, restore.describe_differences()) == ((), (), "")
    restore.missing, restore.unexpected = missing, unexpected
    assert restore.describe_differences() == told


def test_what_was_saved_without_a_part_is_refused(tmp_path: Path) -> None:
    run = Trainer()
    with CheckpointManager(tmp_path, memory=False) as manager:
        run.save(manager, 1)
    with CheckpointManager(tmp_path, memory=False) as manager, pytest.raises(CheckpointError) as raised:
        manager.load_latest(model=run.model, optimizer=run.optimizer, stateful={"scaler": run.scheduler})
    assert str(raised.value) == (
        f"rank 0: {tmp_path / OF.name} was saved without a member scaler; resume without one, or from another checkpoint"
    )
    other = torch.nn.Linear(1, 1)
    with CheckpointManager(tmp_path, memory=False) as manager, pytest.raises(CheckpointError) as raised:
        manager.load_weights(model=other)
    assert (
        str(raised.value) == f"rank 0: {tmp_path / OF.name} does not fit this model: it has no model.bias, model.weight"
    )


# -- resuming ----------------------------------------------------------------------------------------------------------


def resumer_of(store: Any, restore: Any = None) -> Resumer:
    return Resumer(store, mock.MagicMock(), Communicator(), 3, restore or mock.MagicMock())


def test_images_that_differ_from_their_replicas_are_told_and_given_back(caplog: pytest.LogCaptureFixture) -> None:
    bad = {ImageInfo("a", OF, 2, 0, "p", CheckpointId(1, 1)), ImageInfo("b", OF, 4, 1, "p")}
    images, restore = mock.MagicMock(), mock.MagicMock()
    images.digests.return_value = [["a", 0, 0, "x"]]
    images.disagreeing_images.return_value = bad
    with caplog.at_level(logging.WARNING):
        assert resumer_of(None, restore)._fill_from_images(CheckpointId(7, 1), images) == bad
    assert images.mock_calls == [
        mock.call.digests(restore.replica_local),
        mock.call.disagreeing_images([[["a", 0, 0, "x"]]]),
    ]
    assert restore.nested.mock_calls[0] == mock.call(images)
    assert restore.fit.mock_calls == []
    assert caplog.messages == [
        "the checkpoint of step 7 in memory: what ranks 2,4 saved differs from the other replicas, and is not used; memory or "
        "hardware there may be faulty"
    ]


@pytest.mark.parametrize("is_bad", [False, True])
def test_images_fill_the_state_that_was_fitted_and_damage_stops_there(is_bad: bool) -> None:
    bad = {ImageInfo("a", OF, 2, 0, "p")} if is_bad else set()
    images, restore = mock.MagicMock(), mock.MagicMock()
    images.digests.return_value = []
    images.disagreeing_images.return_value = set()
    images.plan_reads.return_value.requested_ranges.return_value = {0: [[1, 2, 3]]}
    images.fill.return_value = bad
    resumer = resumer_of(None, restore)
    chosen = CheckpointId(7, 1)
    assert resumer._fill_from_images(chosen, images) == bad
    nested, filling = restore.nested.return_value, restore.fit.return_value
    assert restore.learn_other_stages.mock_calls == [mock.call(nested, images, resumer._comm)]
    assert restore.fit.mock_calls[0] == mock.call("the checkpoint of step 7 in memory", images, nested)
    assert images.plan_reads.mock_calls[0] == mock.call(filling.targets())
    assert images.fill.mock_calls == [mock.call(images.plan_reads.return_value, {0: [[1, 2, 3]]}, resumer._comm)]
    assert restore.apply.mock_calls == ([] if is_bad else [mock.call(chosen, images, filling, nested)])
    assert resumer._is_half_filled


def test_storage_that_does_not_answer_ends_a_resume_and_damage_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    store: Any = SimpleNamespace(location=lambda of: f"/place/{of.step}")
    resumer = resumer_of(store)

    def broken() -> list[str]:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(CheckpointError) as raised:
        resumer._is_damaged(OF, broken)
    assert str(raised.value) == (
        "rank 0: /place/1 cannot be read at the moment: Input/output error; start again when storage answers, or move it away to "
        "resume from the one before"
    )

    def torn() -> list[str]:
        raise DamagedCheckpoint("it is torn")

    with caplog.at_level(logging.WARNING):
        assert not resumer._is_damaged(OF, list)
        assert resumer.damaged == set()
        assert resumer._is_damaged(OF, torn)
        assert resumer._is_damaged(CheckpointId(2, 1), lambda: ["first", "second"])
    assert caplog.messages == ["skipping a damaged checkpoint: it is torn", "skipping a damaged checkpoint: first"]
    assert (resumer.damaged, resumer._damage) == ({OF, CheckpointId(2, 1)}, "it is torn")


def test_why_the_newest_in_memory_was_not_used_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    resumer = resumer_of(SimpleNamespace(name="/place"))
    newer, older, gone = CheckpointId(9, 2), CheckpointId(8, 2), CheckpointId(5, 1)
    found = (
        ImageInfo("a", newer, 0, 0, "p", gone),
        ImageInfo("a", older, 0, 1, "p"),
        ImageInfo("a", CheckpointId(10, 3), 0, 0, "p"),
    )
    inventory = ImageInventory(("a",), found)
    with caplog.at_level(logging.WARNING):
        resumer._log_skipped("nothing was skipped")
        assert resumer._usable_in_memory(inventory, {gone}) == [newer, older]
        assert resumer._usable_in_memory(inventory, set()) == [older]
        resumer._skip(older, "is not complete")
        resumer._log_skipped("instead")
    assert caplog.messages == [
        "the checkpoint of step 9 in memory is not used, because that of step 5 was deleted from /place; instead"
    ]


# -- lost ranks --------------------------------------------------------------------------------------------------------


class KeptStore:
    """The store of a job, which answers at once. arrives: keys that appear, by the number of the question."""

    def __init__(self, keys: dict[str, bytes], arrives: dict[int, str] | None = None) -> None:
        self.keys, self.arrives, self.asked = keys, arrives or {}, 0

    def set(self, key: str, value: str) -> None:
        self.keys[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.keys[key]

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        if self.asked in self.arrives:
            self.keys[self.arrives[self.asked]] = b""
        (key,) = keys
        return key in self.keys


@pytest.mark.parametrize(
    ("store", "world_size", "told", "pauses"),
    [
        pytest.param(KeptStore({"why": b"rank 2: full"}), 3, "rank 2: full", 0, id="a reason"),
        pytest.param(KeptStore({"left/0": b"", "left/2": b""}), 3, "", 0, id="all others have left too"),
        pytest.param(KeptStore({"left/2": b""}, {6: "left/0"}), 3, "", 2, id="one leaves late"),
        pytest.param(KeptStore({"left/0": b""}), 4, "ranks 2-3 ended, or was silent for 60 s", 3, id="two are silent"),
        pytest.param(KeptStore({}), 65, "", 0, id="nobody is searched for in a large world"),
    ],
)
def test_who_was_lost_is_found_out(
    monkeypatch: pytest.MonkeyPatch, store: KeptStore, world_size: int, told: str, pauses: int
) -> None:
    now, slept = [10.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += 0.4

    monkeypatch.setattr("elastipod.checkpoint.communicator.time.monotonic", lambda: now[0])
    monkeypatch.setattr("elastipod.checkpoint.communicator.time.sleep", sleep)
    monkeypatch.setattr(communicator, "_RANDOM", SimpleNamespace(uniform=lambda low, high: low + high))
    comm: Any = object.__new__(Communicator)
    comm._rank, comm._world_size, comm._store, comm._connections = 1, world_size, store, None
    assert comm._query_store(comm._read_abort_reason) == told
    assert slept == [0.02 * 2.0] * pauses
    assert store.keys["left/1"] == b""


def test_the_store_is_asked_the_less_often_the_larger_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(communicator, "_MAX_NAMED_RANKS", 1000)
    monkeypatch.setattr("elastipod.checkpoint.communicator.time.sleep", slept.append)
    monkeypatch.setattr("elastipod.checkpoint.communicator.time.monotonic", lambda: 0.0)
    monkeypatch.setattr(communicator, "_RANDOM", SimpleNamespace(uniform=lambda low, high: 1.0))
    comm: Any = object.__new__(Communicator)
    comm._rank, comm._world_size = 0, 1000
    store = KeptStore({f"left/{rank}": b"" for rank in range(999)}, {1002: "left/999"})
    assert comm._read_abort_reason(store) == ""
    assert slept == [1000 / 5000]


def test_a_store_that_is_gone_tells_nothing() -> None:
    comm: Any = object.__new__(Communicator)
    comm._store = object()

    def refuse(store: Any) -> str:
        raise RuntimeError("gone")

    assert comm._query_store(refuse) == ""
    assert comm._query_store(lambda store: None) == ""
    assert comm._query_store(lambda store: "why") == "why"
