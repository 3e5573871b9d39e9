"""The store that an agent serves: its calls, what waits, what is too much, and whose generation is served."""

from __future__ import annotations

from typing import Any

import pytest

from elastipod.store_wire import MAX_KEY_BYTES, MAX_VALUE_BYTES, MAX_WAIT_S
from elastipod_agent.core import served_store
from elastipod_agent.core.served_store import MAX_WAITING, NEWCOMERS, CallRefused, StoreAdmission, StoreFence, StoreKeys


class Caller:
    """Calls a store from one connection after the other; keeps what each call is answered, by its ticket."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.keys = StoreKeys(num_ranks)
        self.answered: dict[tuple[int, bytes], list[bytes]] = {}
        self.wait_s = 0.0
        self._number = 0

    def call(self, name: bytes, *arguments: bytes, of: int = 0) -> tuple[int, bytes]:
        self._number += 1
        ticket = (of, b"%d" % self._number)
        answers, self.wait_s = self.keys.call(ticket, name, arguments)
        self.take(answers)
        return ticket

    def take(self, answers: Any) -> None:
        for ticket, answer in answers:
            assert ticket not in self.answered, "a call is answered once"
            self.answered[ticket] = answer

    def ask(self, name: bytes, *arguments: bytes) -> list[bytes]:
        return self.answered[self.call(name, *arguments)]


OK, LATE = b"ok", b"late"


@pytest.mark.parametrize(
    ("before", "call", "answer", "value"),
    [
        pytest.param({}, (b"set", b"k", b"1"), [OK], b"1", id="a new value"),
        pytest.param({b"k": b"0"}, (b"set", b"k", b"1"), [OK], b"1", id="another value"),
        pytest.param({}, (b"set", b"a", b"2", b"k", b"1"), [OK], b"1", id="several values at once"),
        pytest.param({}, (b"add", b"k", b"3"), [OK, b"3"], b"3", id="a counter begins with 0"),
        pytest.param({b"k": b"4"}, (b"add", b"k", b"-5"), [OK, b"-1"], b"-1", id="a counter goes down"),
        pytest.param({b"k": b"a"}, (b"append", b"k", b"b"), [OK], b"ab", id="a value grows"),
        pytest.param({}, (b"append", b"k", b"b"), [OK], b"b", id="a value begins to grow"),
        pytest.param({}, (b"compare_set", b"k", b"", b"n"), [OK, b"n"], b"n", id="nothing was expected, and is there"),
        pytest.param({}, (b"compare_set", b"k", b"x", b"n"), [OK, b"x"], None, id="something was expected"),
        pytest.param({b"k": b"x"}, (b"compare_set", b"k", b"x", b"n"), [OK, b"n"], b"n", id="what was expected is there"),
        pytest.param({b"k": b"y"}, (b"compare_set", b"k", b"x", b"n"), [OK, b"y"], b"y", id="another value is there"),
        pytest.param({b"k": b"y"}, (b"compare_set", b"k", b"", b"n"), [OK, b"y"], b"y", id="nothing was expected"),
        pytest.param({b"k": b"y"}, (b"check", b"k"), [OK, b"1"], b"y", id="it is there"),
        pytest.param({b"k": b"y"}, (b"check", b"k", b"a"), [OK, b"0"], b"y", id="one of two is there"),
        pytest.param({b"k": b"y"}, (b"delete", b"k"), [OK, b"1"], None, id="a key goes"),
        pytest.param({}, (b"delete", b"k"), [OK, b"0"], None, id="a key that is not there"),
        pytest.param({b"k": b"y"}, (b"count",), [OK, b"1"], b"y", id="the number of keys"),
        pytest.param({b"k": b"y"}, (b"get", b"0", b"k", b"k"), [OK, b"y", b"y"], b"y", id="values in the order of the keys"),
        pytest.param({b"k": b"y"}, (b"wait", b"0", b"k"), [OK], b"y", id="a wait tells no values"),
        pytest.param({}, (b"get", b"0", b"k"), [LATE], None, id="nobody waits for no time"),
    ],
)  # fmt: skip
def test_a_call(before: dict[bytes, bytes], call: tuple[bytes, ...], answer: list[bytes], value: bytes | None) -> None:
    caller = Caller()
    for key, given in before.items():
        caller.ask(b"set", key, given)
    assert caller.ask(*call) == answer
    assert caller.wait_s == 0
    assert caller.ask(b"get", b"0", b"k") == ([LATE] if value is None else [OK, value])


def test_a_wait_ends_with_the_last_of_its_keys_however_that_is_made() -> None:
    caller = Caller()
    all_of_them = caller.call(b"get", b"5", b"a", b"b", b"c", b"d", of=1)
    assert caller.wait_s == 5
    one = caller.call(b"wait", b"2.5", b"b", of=2)
    caller.call(b"set", b"a", b"1")
    assert caller.answered.keys().isdisjoint({all_of_them, one})
    caller.call(b"add", b"b", b"2")
    assert caller.answered[one] == [OK]
    caller.call(b"append", b"c", b"3")
    assert all_of_them not in caller.answered
    caller.call(b"compare_set", b"d", b"", b"4")
    assert caller.answered[all_of_them] == [OK, b"1", b"2", b"3", b"4"]
    caller.call(b"set", b"a", b"5")


def test_many_wait_for_one_key_and_are_all_answered_by_the_call_that_makes_it() -> None:
    caller = Caller(512)
    waiting = [caller.call(b"wait", b"60", b"all-arrived", of=rank) for rank in range(512)]
    caller.call(b"set", b"all-arrived", b"1", of=512)
    assert [caller.answered[ticket] for ticket in waiting] == [[OK]] * 512


def test_a_world_of_512_meets_with_as_many_calls_of_each_rank_as_a_small_one() -> None:
    """In the order in which the library and gloo call: arrive, write an address, read all others, report, read the verdict."""
    size = 512
    caller = Caller(size)
    calls = [0] * size

    def each(*parts: bytes, ranks: range = range(size)) -> list[list[bytes] | None]:
        tickets = []
        for rank in ranks:
            calls[rank] += 1
            tickets.append(caller.call(*(part.replace(b"RANK", b"%d" % rank) for part in parts), of=rank))
        return [caller.answered.get(ticket) for ticket in tickets]

    assert each(b"add", b"arrived", b"1")[-1] == [OK, b"%d" % size]
    assert each(b"wait", b"60", b"all-arrived", ranks=range(1, size)) == [None] * (size - 1)
    each(b"set", b"all-arrived", b"1", ranks=range(1))
    each(b"wait", b"60", b"all-arrived", ranks=range(1))
    each(b"set", b"RANK", b"a" * 200)
    read = each(b"get", b"60", *(b"%d" % rank for rank in range(size)))
    assert read == [[OK, *[b"a" * 200] * size]] * size
    each(b"add", b"connected", b"1")
    each(b"compare_set", b"verdict", b"", b"ok", ranks=range(1))
    assert each(b"wait", b"60", b"verdict") == [[OK]] * size
    assert each(b"get", b"60", b"verdict") == [[OK, b"ok"]] * size
    assert max(calls) <= 9
    assert len(caller.answered) == sum(calls), "nobody waits any more"


def test_who_has_waited_long_enough_is_told_so_once_and_never_answered_again() -> None:
    caller = Caller()
    late, other = caller.call(b"wait", b"1", b"k"), caller.call(b"wait", b"2", b"k")
    caller.take(caller.keys.give_up(late))
    assert caller.answered == {late: [LATE]}
    caller.call(b"set", b"k", b"1")
    assert caller.answered[other] == [OK]
    for ticket in (late, other):
        assert caller.keys.give_up(ticket) == [], "the time of a call that has been answered means nothing"


def test_what_a_lost_connection_waited_for_is_forgotten() -> None:
    caller = Caller()
    lost = [caller.call(b"wait", b"1", b"k", of=1) for _ in range(MAX_WAITING)]
    other = caller.call(b"wait", b"1", b"k", of=2)
    caller.keys.forget(1)
    caller.call(b"wait", b"1", b"other", of=1)  # it has no calls that wait any more
    caller.call(b"set", b"k", b"1")
    assert caller.answered[other] == [OK]
    assert caller.answered.keys().isdisjoint(lost)


def test_a_connection_waits_with_a_few_calls_at_once_and_then_again() -> None:
    caller = Caller()
    tickets = [caller.call(b"wait", b"1", b"k") for _ in range(MAX_WAITING)]
    with pytest.raises(CallRefused, match=f"with {MAX_WAITING} calls at once"):
        caller.call(b"wait", b"1", b"k")
    assert caller.call(b"wait", b"1", b"k", of=1) not in caller.answered, "another one may"
    caller.take(caller.keys.give_up(tickets[0]))
    caller.call(b"wait", b"1", b"k")


def test_a_number_that_a_waiting_call_has_is_refused_and_costs_nobody_else_anything() -> None:
    keys = StoreKeys(2)
    ticket, other = (0, b"1"), (1, b"1")
    assert keys.call(ticket, b"wait", [b"60", b"a"]) == ([], 60)
    assert keys.call(other, b"wait", [b"60", b"b"]) == ([], 60), "numbers are those of a connection"
    for key in (b"a", b"b"):
        with pytest.raises(CallRefused, match=r"^a call that waits has this number already$"):
            keys.call(ticket, b"wait", [b"60", key])
    assert keys.call((1, b"2"), b"set", [b"a", b"", b"b", b""]) == (
        [((1, b"2"), [OK]), (ticket, [OK]), (other, [OK])],
        0,
    )


@pytest.mark.parametrize(
    ("call", "why"),
    [
        pytest.param((b"drop", b"k"), r"^the store has no call 'drop'$", id="no such call"),
        pytest.param((b"set",), "a value needs a key", id="nothing to set"),
        pytest.param((b"set", b"k"), "a value needs a key", id="no value"),
        pytest.param((b"add", b"k"), "has 2 arguments, not 1", id="no amount"),
        pytest.param((b"add", b"k", b"x"), "a whole number of 64 bits", id="no number"),
        pytest.param((b"add", b"k", b"9223372036854775808"), "a whole number of 64 bits", id="a number without end"),
        pytest.param((b"add", b"text", b"1"), "a whole number of 64 bits", id="to what is no counter"),
        pytest.param((b"compare_set", b"k", b"a"), "has 3 arguments, not 2", id="nothing desired"),
        pytest.param((b"append", b"k"), "has 2 arguments, not 1", id="nothing to append"),
        pytest.param((b"delete",), "has 1 arguments, not 0", id="nothing to delete"),
        pytest.param((b"wait", b"1"), "a time and keys", id="nothing to wait for"),
        pytest.param((b"wait", b"x", b"k"), f"from 0 to {MAX_WAIT_S:g} s", id="no time"),
        pytest.param((b"wait", b"nan", b"k"), f"from 0 to {MAX_WAIT_S:g} s", id="a time that compares with nothing"),
        pytest.param((b"wait", b"-1", b"k"), f"from 0 to {MAX_WAIT_S:g} s", id="a time that is over"),
        pytest.param((b"get", b"61", b"k"), f"from 0 to {MAX_WAIT_S:g} s", id="a long time"),
        pytest.param((b"set", b"a", b"1", b"k", b"x" * (MAX_VALUE_BYTES + 1)), "'k' has 1 and 65537", id="a large value"),
        pytest.param((b"set", b"k" * (MAX_KEY_BYTES + 1), b""), "has 1025 and 0", id="a long key"),
        pytest.param((b"append", b"full", b"x"), "'full' has 4 and 65537", id="a value that grows too large"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_carried_out_says_why_and_changes_nothing(call: tuple[bytes, ...], why: str) -> None:
    caller = Caller()
    caller.ask(b"set", b"text", b"t", b"full", b"x" * MAX_VALUE_BYTES)
    with pytest.raises(CallRefused, match=why):
        caller.call(*call)
    assert caller.ask(b"count") == [OK, b"2"]


def test_a_generation_has_room_for_each_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_store, "KEYS_PER_RANK", 3)
    monkeypatch.setattr(served_store, "BYTES_PER_RANK", 50)
    caller = Caller(num_ranks=2)
    caller.ask(b"set", *[part for number in range(6) for part in (b"%d" % number, b"x")])
    full = r"^the store of this generation is full: it takes 6 keys and 100 bytes, 3 and 50 for each rank$"
    with pytest.raises(CallRefused, match=full):
        caller.call(b"add", b"7", b"1")
    caller.ask(b"set", b"0", b"y" * 89)  # a key that is there: 6 keys and 94 bytes, of 12
    with pytest.raises(CallRefused, match=full):
        caller.call(b"append", b"1", b"z")
    caller.ask(b"delete", b"0")
    caller.ask(b"set", b"7", b"z" * 89)
    with pytest.raises(CallRefused, match=full):
        caller.call(b"set", b"7", b"z" * 90)


def test_a_store_whose_generation_has_ended_serves_nobody() -> None:
    fence = StoreFence()
    assert fence.admits(1) is StoreAdmission.WAIT, "an agent that was not told anything yet"
    fence.begin(3, 4, is_server=True)
    found = [fence.admits(generation) for generation in (2, 3, 4)]
    assert found == [StoreAdmission.OVER, StoreAdmission.SERVE, StoreAdmission.WAIT]
    assert fence.refusal(2) == "generation 2 is over; this agent knows generation 3"
    fence.end()
    assert [fence.admits(generation) for generation in (3, 4)] == [StoreAdmission.OVER, StoreAdmission.WAIT]
    assert fence.refusal(3) == "the store of generation 3 is not served here, or has ended"
    fence.begin(4, 8, is_server=False)
    assert fence.admits(4) is StoreAdmission.OVER, "another agent serves it"
    assert fence.max_connections == 8 + NEWCOMERS
