"""A newcomer that follows those who train, over a real connection; donor and follower are threads of one process here."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.patience import PATIENCE_S
from tests.unit.in_memory.models import build
from torch import nn

from elastipod.chaos import FOLLOWER, ChaosError, FaultKind, Moment, PlannedFault, plan_faults
from elastipod.errors import ElastipodError
from elastipod.in_memory import donor as donor_module
from elastipod.in_memory import follower as follower_module
from elastipod.in_memory import following as following_module
from elastipod.in_memory.agent_link import WorldPlace
from elastipod.in_memory.apply_step import apply_gradients
from elastipod.in_memory.donor import Donor
from elastipod.in_memory.follow_wire import FollowingEnded, send, shake_hands, shut_down
from elastipod.in_memory.followed_state import FollowedState
from elastipod.in_memory.follower import Follower
from elastipod.in_memory.members import Members
from elastipod.in_memory.memory_state import MemoryState
from elastipod.in_memory.phase_limit import PhaseLimit
from elastipod.ipc.protocol import EARLY_START_ENV, FOLLOWED_STORE_ENV, WORKER_KEY_ENV

KEY = "0f" * 32


class Training:
    """Trains members as a rank does, with a donor at its side."""

    def __init__(self, members: Members) -> None:
        self.members, self.step = members, 0
        self.donor = Donor(members, KEY, "127.0.0.1")

    def train(self, steps: int = 1, *, awaits_followers: bool = True) -> None:
        """Train steps. A donor copies more of the state only when what it copied before has left, so each step waits for that."""
        for _ in range(steps):
            self.step += 1
            self.members.zero_grad()
            inputs = torch.full((4, 3), float(self.step)) + torch.eye(4, 3)
            self.members.model(inputs).square().sum().backward()
            self.donor.before_step()
            apply_gradients(self.members)
            self.donor.after_step(self.step)
            if awaits_followers:
                _until(lambda: not any(each._waiting_bytes for each in self.donor.followers if not each.is_over))

    def wait_for_followers(self, number: int) -> None:
        _until(lambda: sum(each.is_ready for each in self.donor.followers) == number)


@pytest.fixture
def training() -> Iterator[Training]:
    training = Training(Members(build(1)))
    training.train(2)
    yield training
    training.donor.close()


@pytest.fixture(autouse=True)
def one_parameter_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donor_module, "COPIED_BYTES", 1)


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of a busy machine may be slow."""
    monkeypatch.setattr(donor_module, "HANDSHAKE_S", PATIENCE_S)
    monkeypatch.setattr(follower_module, "HANDSHAKE_S", PATIENCE_S)
    monkeypatch.setattr(follower_module, "LAST_STEPS_S", PATIENCE_S)


def begin(training: Training, members: Members, monkeypatch: pytest.MonkeyPatch, key: str = KEY) -> Follower:
    """Have members follow a training; return once its donor has taken them."""
    address = ("127.0.0.1", training.donor.port)
    monkeypatch.setattr(follower_module, "donor_address", lambda store, generation, key: address)
    monkeypatch.setattr(follower_module, "WHOLE_S", 0.0)
    return Follower(members, key, "a store")


def same_keys(one: Members, other: Members) -> set[str]:
    ours, theirs = one.digests(), other.digests()
    return {key for key in ours if ours[key] == theirs.get(key)}


def test_a_newcomer_that_follows_holds_every_parameter_with_its_moments(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parameters arrive in different steps, and are stepped with the gradients of each step after that."""
    newcomer = Members(build(9))
    follower = begin(training, newcomer, monkeypatch)
    training.wait_for_followers(1)
    training.train(12)
    training.donor.close()
    assert follower.finish() == 14
    parameters = {f"model.{name}" for name, _ in newcomer.model.named_parameters()}
    moments = {key for key in training.members.content().tensors if key.startswith("optimizer.")}
    assert len(parameters) == 6
    assert len(moments) == 18
    assert same_keys(newcomer, training.members) >= parameters | moments


def test_a_newcomer_follows_an_optimizer_that_changes_gradients_in_place(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step with a follower shows it; no gradient of that step is sent, since the follower has no parameters yet."""

    def members(seed: int) -> Members:
        model = build(seed)["model"]
        return Members((model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=True)))

    nesterov, newcomer = Training(members(1)), members(9)
    nesterov.train(2)
    follower = begin(nesterov, newcomer, monkeypatch)
    nesterov.wait_for_followers(1)
    nesterov.train(12)
    nesterov.donor.close()
    assert follower.finish() == 14
    assert newcomer.digests() == nesterov.members.digests()


def test_two_newcomers_follow_one_rank_from_different_steps_on(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    newcomers = [Members(build(seed)) for seed in (8, 9)]
    followers = []
    for number, members in enumerate(newcomers, start=1):
        followers.append(begin(training, members, monkeypatch))
        training.wait_for_followers(number)
        training.train(3)
    training.train(6)
    training.donor.close()
    assert [each.finish() for each in followers] == [14, 14]
    assert "model.0.weight" in same_keys(newcomers[0], training.members) & same_keys(newcomers[1], training.members)


def test_a_newcomer_that_lacks_a_part_when_the_world_ends_says_so(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = begin(training, Members(build(9)), monkeypatch)
    training.wait_for_followers(1)
    training.train(5)
    training.donor.close()
    assert follower.finish() is None
    assert follower.has_begun


def test_nobody_waits_for_a_donor_that_is_silent(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "LAST_STEPS_S", 0.05)
    follower = begin(training, Members(build(9)), monkeypatch)
    training.wait_for_followers(1)
    assert follower.finish() is None
    assert not follower.has_begun

    def is_dropped() -> bool:
        training.train()
        return not training.donor.followers

    _until(is_dropped)


def test_nobody_waits_for_a_store_that_hangs(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a rank hosts gives no answer when this rank's process stands still; when it goes on, it is too late to follow."""
    goes_on = threading.Event()

    def late_address(*_: object) -> tuple[str, int]:
        goes_on.wait(PATIENCE_S)
        return "127.0.0.1", training.donor.port

    monkeypatch.setattr(follower_module, "donor_address", late_address)
    monkeypatch.setattr(follower_module, "WHOLE_S", 0.0)
    monkeypatch.setattr(follower_module, "LAST_STEPS_S", 0.05)
    follower = Follower(Members(build(9)), KEY, "a store")
    assert follower.finish() is None
    assert follower._thread.is_alive(), "nobody has waited for it"
    goes_on.set()
    follower._thread.join(PATIENCE_S)
    training.train(3)
    assert (follower.has_begun, follower.step) == (False, None)


def test_a_follower_that_falls_behind_is_dropped_and_the_training_goes_on(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(donor_module, "MAX_WAITING_BYTES", 100)
    held = threading.Event()

    def send_late(peer: socket.socket, *given: Any) -> None:
        held.wait(PATIENCE_S)
        send(peer, *given)

    monkeypatch.setattr(donor_module, "send", send_late)
    follower = begin(training, Members(build(9)), monkeypatch)
    training.wait_for_followers(1)
    training.train(12, awaits_followers=False)
    held.set()
    assert follower.finish() is None
    assert "a newcomer follows this rank no longer and will be filled when it joins: it is" in caplog.text
    assert not training.donor.followers


@pytest.mark.parametrize("key", ["another", ""])
def test_a_caller_without_the_key_gets_nothing(training: Training, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    follower = begin(training, Members(build(9)), monkeypatch, key)
    assert follower.finish() is None
    assert not follower.has_begun
    _until(lambda: [each.is_over and not each.is_ready for each in training.donor.followers] == [True])


def test_a_caller_that_says_nonsense_is_refused_and_the_next_is_taken(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    for said in (b"x" * 512, b"[1]\n", b"{}\n{}\n", b"\n"):
        with socket.create_connection(("127.0.0.1", training.donor.port), timeout=PATIENCE_S) as peer:
            peer.sendall(said)
            while peer.recv(1000):
                pass
        training.train()
    begin(training, Members(build(9)), monkeypatch)
    training.wait_for_followers(1)


def test_a_newcomer_that_has_built_another_model_does_not_follow(training: Training) -> None:
    other = nn.Linear(2, 2)
    state = FollowedState(Members((other, torch.optim.AdamW(other.parameters()))))
    address = ("127.0.0.1", training.donor.port)
    refused = pytest.raises(FollowingEnded, match="has built another model")
    with socket.create_connection(address, timeout=PATIENCE_S) as peer, peer.makefile("rb") as file, refused:
        shake_hands(peer, file, KEY, state.layout, is_donor=False)


def _scaled() -> dict[str, Any]:
    return {**build(), "scaler": torch.amp.GradScaler("cpu")}


@pytest.mark.parametrize("built", [_scaled(), {"model": nn.Linear(1, 1)}], ids=["GradScaler", "no optimizer"])
def test_steps_that_gradients_alone_do_not_repeat_are_not_followed(built: dict[str, Any]) -> None:
    with pytest.raises(FollowingEnded):
        Donor(Members(built), KEY, "127.0.0.1")


def test_gradients_in_a_bucket_are_copied_because_the_next_step_overwrites_them() -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    bucket = torch.ones(2)
    weights[0].grad, weights[1].grad = bucket.view(2), torch.ones(2)
    held = donor_module._held(weights)
    bucket += 1
    assert held[0].tolist() == [1.0, 1.0]
    assert held[1].data_ptr() == weights[1].grad.data_ptr()


def test_a_donor_that_dies_within_a_step_leaves_nothing_that_counts(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parameters were there before that step."""
    sent = []

    def send_half(peer: socket.socket, head: Any, tensors: Any) -> None:
        sent.append(head)
        send(peer, head, tensors if len(sent) < 9 else tensors[:2])
        if len(sent) == 9:
            peer.shutdown(socket.SHUT_RDWR)

    monkeypatch.setattr(donor_module, "send", send_half)
    follower = begin(training, Members(build(9)), monkeypatch)
    training.wait_for_followers(1)
    training.train(12)
    follower._thread.join(PATIENCE_S)
    assert sent[8]["is_whole"]
    assert len(sent[8]["of"]) == 6
    assert follower.finish() is None
    assert follower.has_begun


def test_a_newcomer_that_is_started_while_others_drain_follows_them_to_their_end(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their steps may take longer than those who have stopped need for what is under way."""
    monkeypatch.setattr(follower_module, "LAST_STEPS_S", 0.0)
    memory = follows(training, monkeypatch)
    training.train(8)
    monkeypatch.setenv(EARLY_START_ENV, "1")
    finishes = threading.Thread(target=memory.finish_following)
    finishes.start()
    training.train(3)
    assert memory.following.step is None, "it follows on"
    training.donor.close()
    finishes.join(PATIENCE_S)
    assert memory.following.step == 13


def follows(training: Training, monkeypatch: pytest.MonkeyPatch) -> MemoryState:
    """Give the state of a newcomer that follows a training as a prepared worker does."""
    address = ("127.0.0.1", training.donor.port)
    monkeypatch.setattr(follower_module, "donor_address", lambda store, generation, key: address)
    monkeypatch.setattr(follower_module, "WHOLE_S", 0.0)
    monkeypatch.setenv(FOLLOWED_STORE_ENV, "a store")
    monkeypatch.setenv(WORKER_KEY_ENV, KEY)
    memory = MemoryState(Members(build(9)), PhaseLimit())
    memory.following.begin()
    training.wait_for_followers(1)
    return memory


def test_a_newcomer_reserves_what_memory_its_donor_has_beyond_its_own(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the thread that will train, once all of the state is there, and before it goes to the barrier."""
    monkeypatch.setattr(donor_module, "private_bytes", lambda: 900)
    monkeypatch.setattr(following_module, "private_bytes", lambda: 300)
    reserved: list[tuple[int, str]] = []
    monkeypatch.setattr(
        following_module, "reserve", lambda size: reserved.append((size, threading.current_thread().name))
    )
    address = ("127.0.0.1", training.donor.port)
    monkeypatch.setattr(follower_module, "donor_address", lambda store, generation, key: address)
    monkeypatch.setenv(FOLLOWED_STORE_ENV, "a store")
    monkeypatch.setenv(WORKER_KEY_ENV, KEY)
    memory = MemoryState(Members(build(9)), PhaseLimit())
    trains = threading.Thread(target=memory.following.begin, name="trains")
    trains.start()
    training.wait_for_followers(1)
    training.train(3)
    assert reserved == [], "it does not know yet"
    training.train(6)
    trains.join(PATIENCE_S)
    assert reserved == [(600, "trains")]


def test_a_newcomer_computes_its_digests_as_soon_as_its_donor_has_stopped(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next generation need not have begun, and does not compute them again."""
    read: list[str] = []
    digests = Members.digests
    memory = follows(training, monkeypatch)

    def noted(*given: Any, **named: Any) -> dict[str, str]:
        read.append(threading.current_thread().name)
        return digests(*given, **named)

    monkeypatch.setattr(Members, "digests", noted)
    training.train(12)
    assert read == [], "not while it follows"
    training.donor.close()
    _until(lambda: read)
    memory.finish_following()
    assert memory.following.step == 14
    found = memory._at_rest.digests()
    assert read == ["elastipod-digests"]
    assert found == digests(memory.members)


def test_a_newcomer_whose_donor_dies_midway_has_no_digests(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = follows(training, monkeypatch)
    training.train(3)
    for each in training.donor.followers:
        each.end("it dies")
    assert memory.following._follower is not None
    memory.following._follower._thread.join(PATIENCE_S)
    assert not memory._at_rest.has_begun
    memory.finish_following()
    assert memory.following.step is None
    assert not memory._at_rest.has_begun


def test_a_newcomer_whose_donor_dies_between_steps_has_digests_once_its_state_stands_still(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = follows(training, monkeypatch)
    training.train(12)
    shut_down(training.donor.followers[0]._peer)
    assert memory.following._follower is not None
    memory.following._follower._thread.join(PATIENCE_S)
    assert not memory._at_rest.has_begun
    memory.finish_following()
    assert memory.following.step == 14
    assert memory._at_rest.has_begun


def test_a_newcomer_that_has_followed_and_is_left_alone_does_not_begin_anew(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has built is gone. A checkpoint, or what others have built, takes the place of all."""
    memory = MemoryState(Members(build(9)), PhaseLimit())
    memory.following._follower = begin(training, memory.members, monkeypatch)
    training.wait_for_followers(1)
    training.train(3)
    training.donor.close()
    memory.finish_following()
    with pytest.raises(ElastipodError, match="a new process starts from the beginning"):
        memory.begin_anew(0, rank=0, world_size=2, loaded_by=None)
    assert len(memory.begin_anew(0, rank=1, world_size=2, loaded_by=None)) == 2
    assert len(memory.begin_anew(7, rank=0, world_size=2, loaded_by=range(2))) == 2


def test_a_state_that_the_script_applies_in_its_own_way_is_neither_followed_nor_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(WORKER_KEY_ENV, KEY)
    told: list[str] = []
    place = WorldPlace(1, 0, 2, "127.0.0.1", 1234)
    for can_be_followed in (True, False):
        following = MemoryState(Members(build()), PhaseLimit(), can_be_followed=can_be_followed).following
        monkeypatch.setenv(FOLLOWED_STORE_ENV, "127.0.0.1:1")
        monkeypatch.setattr(follower_module, "HANDSHAKE_S", 0.05)
        following.listen(place, lambda key, value: told.append(key))
        following.begin()
        assert (following._donor is not None, following._follower is not None) == (can_be_followed, can_be_followed)
        following.close()
    assert told == ["donor/0", "donors"]


def test_a_step_goes_on_when_there_is_no_memory_for_followers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(WORKER_KEY_ENV, KEY)
    following = MemoryState(Members(build()), PhaseLimit()).following
    following.listen(WorldPlace(1, 0, 2, "127.0.0.1", 1234), lambda key, value: None)

    def fail(step: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(following._donor, "after_step", fail)
    following.at_step()
    following.at_step(1)
    following.at_step(2)
    assert len([each for each in caplog.records if "follow this rank no longer" in each.message]) == 1


def _until(is_so: Any) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.005)


# -- faults on purpose


def test_a_rank_that_is_followed_and_its_follower_pass_a_moment_of_a_step(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody follows, nobody passes it."""
    passed: list[tuple[str, int, int]] = []
    for module in (donor_module, follower_module):
        monkeypatch.setattr(module, "reached", lambda at, *, rank, step: passed.append((at, rank, step)))
    training.donor._rank = 2
    training.train()
    assert passed == []
    follower = begin(training, Members(build(9)), monkeypatch)
    training.wait_for_followers(1)
    training.train(2)
    training.donor.close()
    follower.finish()
    assert sorted(passed) == [(Moment.FOLLOWING, rank, step) for rank in (FOLLOWER, 2) for step in (4, 5)]


def test_a_newcomer_whose_thread_fails_has_followed_nobody(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a step: what it holds is no step's."""
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda each: failed.append(each.exc_type))
    plan_faults([PlannedFault(FaultKind.RAISE, Moment.FOLLOWING, rank=FOLLOWER, step=11)])
    memory = follows(training, monkeypatch)
    training.train(12)
    memory.finish_following()
    assert failed == [ChaosError]
    assert (memory.following.step, memory.following.has_changed_state) == (None, True)


def test_a_newcomer_whose_thread_hangs_is_not_waited_for_without_a_limit(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change the state at any time, so this process does not join: a new one takes its place."""
    goes_on, hangs = threading.Event(), threading.Event()

    def hang(*_: Any, **__: Any) -> None:
        hangs.set()
        goes_on.wait(PATIENCE_S)

    monkeypatch.setattr(follower_module, "reached", hang)
    monkeypatch.setattr(follower_module, "LAST_STEPS_S", 0.05)
    follower = begin(training, Members(build(9)), monkeypatch)
    training.wait_for_followers(1)
    training.train()
    assert hangs.wait(PATIENCE_S)
    with pytest.raises(ElastipodError, match="the thread that follows does not end"):
        follower.finish()
    goes_on.set()
    follower._thread.join(PATIENCE_S)
