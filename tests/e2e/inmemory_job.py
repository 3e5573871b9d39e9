"""A job whose ranks keep their processes: real workers, and one thread that plays their agents and the operator.

It speaks the protocol of the agents' socket (docs/design/contracts.md, 11), so the workers cannot tell it from real ones. One slot
is one pod with one rank. A test says how the job changes; whatever else happens is answered as the operator does: the ranks that
are left are called back, dead ones get a new process, and the next generation starts when all are at the barrier.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.e2e.inmemory_agents import AgentSocket
from tests.e2e.inmemory_holds import hold
from tests.e2e.inmemory_processes import SlotProcesses, place_in
from tests.e2e.inmemory_slots import Ended, NextRun, Resize, Slot, is_stopped, kill
from tests.e2e.torch_fork_server import TorchForkServer
from tests.free_ports import free_port
from tests.patience import PATIENCE_S

from elastipod.chaos import FaultKind, PlannedFault
from elastipod.ipc.protocol import EARLY_START_ENV, FOLLOWED_STORE_ENV, WORKER_KEY_ENV
from elastipod.worker_file import EventLevel, WorkerFile

WORKER = Path(__file__).with_name("inmemory_worker.py")
MAX_SLOTS = 8
FOLLOWED_FROM = 2  # the step after which newcomers that follow are begun
POLL_S = 0.005
RETURN_S = 60.0  # for a process that was in a generation; one that has just begun imports for as long as it takes


def train_alone(
    folder: Path, servers: TorchForkServer, worker: Path = WORKER, options: Mapping[str, Any] | None = None
) -> None:
    """Train in a single process that no agent knows and nothing disturbs; leaves in the folder what a rank leaves."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    output = folder / "output"
    told = json.dumps({"folder": str(folder), "step_s": 0, **(options or {})})
    process = servers.start([str(worker), told], environment, output)
    assert process.wait(PATIENCE_S) == 0, output.read_text("utf-8", "replace")


class InMemoryJob:
    """One job; `run` plays it to its end. hang_s: for how long a member of a running generation may report nothing. return_s: for how
    long one may take to come back from a generation that a fault has ended.

    command: another script than the tests' worker, with its arguments. racks: how many failure domains the slots are spread over in
    turn; the death of one kills all of its rack. 0: each slot is by itself. newcomers_follow: those of the first growth come while the
    others train, and follow them. agents_begin: a planned change is decided before any worker stops, and each agent begins the generation
    that follows by itself, as soon as its worker is back. Newcomers are at the barrier before.
    """

    def __init__(
        self,
        folder: Path,
        servers: TorchForkServer,
        *,
        size: int,
        resizes: Sequence[Resize] = (),
        faults: Sequence[PlannedFault] = (),
        options: Mapping[str, Any] | None = None,
        hang_s: float = 3.0,
        return_s: float = RETURN_S,
        command: Sequence[str] = (),
        worker: Path = WORKER,
        racks: int = 0,
        newcomers_follow: bool = False,
        agents_begin: bool = False,
    ) -> None:
        self.folder = folder
        self._racks = racks
        self.log: list[str] = []
        self._size = size
        self._resizes = list(resizes)
        # The ranks wait for each planned change after its step, unless a fault comes in between: no job is through before it.
        self._holds = [hold(folder, each.after_step) for each in resizes]
        # After a step that leaves enough for the newcomers, the ranks wait for them to come.
        self._newcomers_hold = hold(folder, FOLLOWED_FROM) if newcomers_follow else None
        self._newcomers: range | None = None
        self._newcomers_until = 0.0
        self._agents_begin = agents_begin
        self._next: NextRun | None = None
        self._begun_by_agents: set[int] = set()
        self._port = 0
        # Each happens once in the life of the job, not once in that of every process that takes the rank.
        self._faults = [replace(fault, once=str(folder / f"fault-{at}")) for at, fault in enumerate(faults)]
        own = list(command) or [str(worker), json.dumps({"folder": str(folder), **(options or {})})]
        key = {WORKER_KEY_ENV: "0f" * 32} if newcomers_follow or agents_begin else {}
        self._processes = SlotProcesses(servers, folder, own, self._faults, racks, key)
        self._hang_s, self._return_s = hang_s, return_s
        self._changed = threading.Condition()
        self._slots: dict[int, Slot] = {}
        self._members: tuple[int, ...] = ()
        self._run = self._num_faults = 0
        self._is_running = False
        self._starts: dict[int, dict[str, Any]] = {}
        self._since = 0.0
        self._reported: str | None = None
        self._trained: set[int] = set()  # processes that have completed a step
        self._released: set[int] = set()  # processes that have been in a generation
        self._planned: set[int] = set()
        self._is_disturbed = False  # something happened since the last start that nobody planned
        self._dead: set[int] = set()  # processes that had trained and have died since the state was last safe
        self._most_dead = 0

    # -- the operator --------------------------------------------------------------------------------------------

    def run(self, limit_s: float) -> Ended:
        """Play the job to its end, or to the limit."""
        server = AgentSocket(str(self._processes.socket), self.answer)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="agents")
        thread.start()
        is_complete = False
        try:
            self._add_slots(range(self._size))  # the first one waits for the fork server to load torch
            deadline = time.monotonic() + limit_s
            while time.monotonic() < deadline and not is_complete:
                with self._changed:
                    is_complete = self._look()
                    self._changed.wait(POLL_S)
        finally:
            for slot in self._slots.values():
                kill(slot)
            for slot in self._slots.values():
                slot.process.wait(PATIENCE_S)
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
            server.shutdown()
            thread.join()
            server.server_close()
        processes = sum(slot.num_processes for slot in self._slots.values())
        return Ended(
            self._run, processes, self._members, self._num_faults, self._lost_copies, is_complete,
            frozenset(self._planned), self._most_dead, frozenset(self._begun_by_agents), self.log,
        )  # fmt: skip

    _is_closed = False
    _lost_copies = 0

    def _look(self) -> bool:
        """Do what is due; True when the job is complete."""
        for slot in self._slots.values():
            if not self._is_running and slot.process.poll() not in (None, 0):
                self._replace(slot)
        if not self._is_running:
            self._gather()
            return False
        self._take_over_next()
        members = [self._slots[number] for number in self._members]
        if all(slot.process.poll() == 0 for slot in members):
            return True
        present = members + [slot for slot in self._slots_of_next() if slot.number not in self._members]
        self._kill_hung(present)
        self._forget_leavers(members)
        fault = self._fault(present)
        if fault:
            self._leave_generation(present, fault)
        elif self._are_newcomers_due(members):
            self._begin_newcomers()
        elif self._resizes and not self._awaits_newcomers() and self._is_resize_due(members):
            self._drain(members)
        elif self._is_draining and all(slot.is_at_barrier for slot in members):
            self._is_running = False
        return False

    def _fault(self, present: Sequence[Slot]) -> str:
        """Say what keeps the generation, or the one that follows, from going on; empty when nothing does."""
        dead = [slot.number for slot in present if slot.process.poll() not in (None, 0)]
        if self._racks and dead:
            dead = [slot.number for slot in present if slot.number % self._racks == dead[0] % self._racks]
            for number in dead:
                kill(self._slots[number])
        stopped = [slot.number for slot in self._slots_of_next() if slot.is_at_barrier and not slot.has_left]
        if dead:
            return f"slots {dead} died"
        return self._reported or (f"slots {stopped} stopped without beginning the next generation" if stopped else "")

    def _leave_generation(self, present: Sequence[Slot], fault: str) -> None:
        """All who are present must come back. A generation that agents were told of is withdrawn, and its number is never used again."""
        self._note(f"fault: {fault}")
        self._num_faults += 1
        self._is_disturbed = True
        for slot in present:
            slot.fault_run, slot.is_released = slot.run, False
        if self._next is not None:
            self._run, self._next = self._next.run, None
        self._is_running, self._reported = False, None
        self._since = time.monotonic()
        self._changed.notify_all()
        self._end_holds(len(self._holds))
        self._end_newcomers_hold()
        self._undo_resize()

    _is_draining = False
    _holds_shards = False

    def _is_resize_due(self, members: Sequence[Slot]) -> bool:
        have_begun = all(slot.reported_at[0] > slot.reports_before for slot in members)
        return have_begun and self._step(members) >= self._resizes[0].after_step

    def _drain(self, members: Sequence[Slot]) -> None:
        self._size = self._resizes.pop(0).size
        self._is_draining = True
        staying = set(range(self._size))
        self._note(f"resize to {self._size}")
        for slot in members:
            slot.file.set_event(EventLevel.DRAIN, time.time() + PATIENCE_S, leaves=slot.number not in staying)
        if self._agents_begin and all(self._is_ready(number) for number in staying.difference(self._members)):
            self._tell_next()
        self._newcomers = None
        self._end_holds(1)

    def _undo_resize(self) -> None:
        """A fault in a shrink of sharded state makes members of those who were to leave; they leave once all have made a step."""
        if self._is_draining and self._holds_shards and self._size < len(self._members):
            self._note("those who were to leave are members again")
            self._resizes.insert(0, Resize(0, self._size))
            self._size = len(self._members)
            self._is_draining = False

    # -- the generation that agents begin by themselves ----------------------------------------------------------

    def _is_ready(self, number: int) -> bool:
        slot = self._slots.get(number)
        return slot is not None and slot.is_at_barrier and slot.process.poll() is None

    def _tell_next(self) -> None:
        """Decide what follows the drain, and let newcomers begin it at once: they follow the others to their end."""
        run, port = self._run + 1, free_port()
        starts = {number: place_in(run, number, self._size, port) for number in range(self._size)}
        self._next = NextRun(run, starts)
        self._note(f"generation {run} follows")
        for number in starts.keys() - self._members:
            self._release(self._slots[number], run, {**starts[number], EARLY_START_ENV: "1"})

    def _begin_next(self, slot: Slot) -> None:
        """Begin the generation that follows, if this slot is a member and has not begun it yet."""
        following = self._next
        if following is not None and slot.number in following.starts and slot.run < following.run:
            self._release(slot, following.run, following.starts[slot.number])

    def _slots_of_next(self) -> list[Slot]:
        return [] if self._next is None else [self._slots[number] for number in self._next.starts]

    def _take_over_next(self) -> None:
        """Go on with the generation that the agents of all its members have begun."""
        following = self._next
        if following is None or any(slot.run != following.run for slot in self._slots_of_next()):
            return
        self._note(f"all agents have begun {following.run}: {len(following.starts)} ranks")
        self._begun_by_agents.add(following.run)
        self._port = int(following.starts[0]["MASTER_PORT"])
        self._next = None
        self._enter(following.run, tuple(following.starts))

    # -- newcomers that follow -----------------------------------------------------------------------------------

    def _are_newcomers_due(self, members: Sequence[Slot]) -> bool:
        if self._newcomers is not None or not self._resizes or self._resizes[0].size <= self._size:
            return False
        if self._newcomers_hold is not None:
            return self._step(members) >= FOLLOWED_FROM
        return self._agents_begin and self._is_resize_due(members)

    def _begin_newcomers(self) -> None:
        self._newcomers = range(self._size, self._resizes[0].size)
        self._newcomers_until = time.monotonic() + RETURN_S / 3
        followed = {FOLLOWED_STORE_ENV: f"127.0.0.1:{self._port}", "ELASTIPOD_GENERATION": str(self._run)}
        self._add_slots(self._newcomers, followed)
        self._note(f"slots {list(self._newcomers)} are to follow")

    def _awaits_newcomers(self) -> bool:
        """Whether newcomers may still come to the barrier before the change. Lets the others go on once they have come to life."""
        if self._newcomers is None:
            return False
        slots = [self._slots[number] for number in self._newcomers]
        for slot in slots:
            if is_stopped(slot.process):
                kill(slot)
        coming = [slot for slot in slots if slot.process.poll() is None]
        if all(slot.has_called for slot in coming):
            self._end_newcomers_hold()
        return any(not slot.is_at_barrier for slot in coming) and time.monotonic() < self._newcomers_until

    def _end_newcomers_hold(self) -> None:
        if self._newcomers_hold is not None:
            self._newcomers_hold.unlink()
            self._newcomers_hold = None

    def _end_holds(self, count: int) -> None:
        for file in self._holds[:count]:
            file.unlink()
        del self._holds[:count]

    def _gather(self) -> None:
        """Start the next generation when everyone that it needs is at the barrier."""
        self._keep_holders()
        wanted = tuple(range(self._size))
        for number in sorted({*wanted, *self._members}):
            slot = self._slots.get(number)
            if slot is None or (number in wanted and slot.process.poll() is not None):
                self._add_slots(wanted)
                return
        late = [n for n in (*wanted, *self._members) if not self._is_back(self._slots[n])]
        if late:
            if self._since and time.monotonic() - self._since > self._return_s:
                for number in {n for n in late if self._slots[n].process.pid in self._released}:
                    self._note(f"slot {number} does not come back: killed")
                    kill(self._slots[number])
                self._since = time.monotonic()
            return
        if self._trained and not self._living_trained():
            self._lost_copies += 1
            self._trained.clear()
        run, self._port = self._run + 1, free_port()
        for rank, number in enumerate(wanted):
            self._release(self._slots[number], run, place_in(run, rank, self._size, self._port))
        self._note(f"start {run}: {self._size} ranks")
        self._enter(run, wanted)

    def _living_trained(self) -> set[int]:
        """Give the slots whose process has completed a step and lives: with replicated state, each holds all of it."""
        return {
            number
            for number, slot in self._slots.items()
            if slot.process.pid in self._trained and slot.process.poll() is None
        }

    def _forget_leavers(self, members: Sequence[Slot]) -> None:
        """Once all members have made a step, what others have left with is older."""
        if all(slot.reported_at[0] > slot.reports_before for slot in members):
            self._trained &= {slot.process.pid for slot in members}

    def _keep_holders(self) -> None:
        """Make members again of those who have left, if they alone hold the state; they leave once all have made a step."""
        holders = self._living_trained()
        if holders and min(holders) >= self._size:
            self._note(f"slots {sorted(holders)} have left, and alone hold the state: they are members again")
            self._resizes.insert(0, Resize(0, self._size))
            self._size = max(holders) + 1

    def _enter(self, run: int, members: tuple[int, ...]) -> None:
        """Go on with a generation that all its members have been released into."""
        self._run = run
        if self._is_draining and not self._is_disturbed:
            self._planned.add(run)
        self._members, self._is_running, self._is_draining = members, True, False
        self._is_disturbed = False
        self._since = time.monotonic()

    def _release(self, slot: Slot, run: int, environment: dict[str, Any]) -> None:
        """Let the worker of a slot begin a run."""
        slot.file.set_event(EventLevel.NONE)
        slot.run, slot.is_released, slot.is_at_barrier = run, True, False
        self._released.add(slot.process.pid)
        slot.reported_at = (slot.file.num_reports(slot.number), time.monotonic())
        slot.reports_before = slot.reported_at[0]
        self._starts[slot.number] = environment
        self._changed.notify_all()

    def _is_back(self, slot: Slot) -> bool:
        return slot.is_at_barrier or (slot.number not in range(self._size) and slot.process.poll() is not None)

    def _kill_hung(self, members: Sequence[Slot]) -> None:
        """Kill the members that are stopped, and those that hang on purpose once nobody gets on."""
        now = time.monotonic()
        for slot in members:
            count = slot.file.num_reports(slot.number)
            if count != slot.reported_at[0]:
                slot.reported_at = (count, now)
                self._trained.add(slot.process.pid)
            elif now - slot.reported_at[1] > self._hang_s / 4 and is_stopped(slot.process):
                kill(slot)
        alive = [slot for slot in members if slot.process.poll() is None]
        if all(slot.reported_at[0] >= slot.reports_before + 3 for slot in members):
            self._dead.clear()
        if alive and all(now - slot.reported_at[1] > self._hang_s for slot in alive):
            planned = (Path(fault.once) for fault in self._faults if fault.kind is FaultKind.HANG)
            hanging = {path.read_text() for path in planned if path.exists()}
            for slot in alive:
                if str(slot.process.pid) in hanging:
                    self._note(f"slot {slot.number} hangs: killed")
                    slot.reported_at = (slot.reported_at[0], now)
                    kill(slot)

    def _step(self, members: Sequence[Slot]) -> int:
        known = [slot.file.progress(slot.number) for slot in members]
        return min((each.step if each else 0) for each in known)

    # -- processes -----------------------------------------------------------------------------------------------

    def _add_slots(self, numbers: Iterable[int], environment: Mapping[str, str] | None = None) -> None:
        for number in numbers:
            if number not in self._slots:
                self._add_slot(number, environment)
            elif self._slots[number].process.poll() is not None:
                self._replace(self._slots[number])

    def _add_slot(self, number: int, environment: Mapping[str, str] | None = None) -> None:
        file = WorkerFile.create(self._processes.worker_file(number), MAX_SLOTS)
        slot = Slot(number, self._processes.start(number, 1, environment), file, self._run)
        with self._changed:
            self._slots[number] = slot
            self._changed.notify_all()  # its process may be asking already

    def _replace(self, slot: Slot) -> None:
        slot.num_processes += 1
        self._is_disturbed = True
        if slot.process.pid in self._trained:
            self._dead.add(slot.process.pid)
            self._most_dead = max(self._most_dead, len(self._dead))
        slot.is_at_barrier, slot.is_released, slot.run = False, False, self._run
        slot.process = self._processes.start(slot.number, slot.num_processes)
        self._note(f"slot {slot.number} has a new process")

    def _note(self, text: str) -> None:
        self.log.append(f"{time.monotonic():.3f} {text}")

    # -- the agents ----------------------------------------------------------------------------------------------

    def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a worker."""
        slot = self._slots_when_known(int(call["local_rank"]))
        name = call["call"]
        if name == "hello":
            slot.has_called = True
            return {"run": slot.run, "now": self._run}
        if name == "keep":
            self._holds_shards |= call["kind"] == "sharded"
        if name == "barrier":
            slot.has_left = call.get("has_left") is True
            return self._wait_for_start(slot, int(call["after"]), float(call["wait_s"]))
        if name == "fault":
            return self._wait_for_fault(slot, int(call["after"]), float(call["wait_s"]))
        if name == "send_fault" and int(call["run"]) == slot.run and slot.is_released and self._is_running:
            self._reported = f"slot {slot.number}: {call['message']}"
        return {}

    def _slots_when_known(self, number: int) -> Slot:
        with self._changed:
            self._changed.wait_for(lambda: number in self._slots, PATIENCE_S)
            return self._slots[number]

    def _wait_for_start(self, slot: Slot, after: int, wait_s: float) -> dict[str, Any]:
        pid = slot.process.pid
        with self._changed:
            slot.is_at_barrier = True
            if slot.has_left:
                self._begin_next(slot)
            self._changed.notify_all()
            if not self._until(lambda: slot.run > after and slot.is_released, wait_s):
                return {"is_late": True}
            if slot.process.pid != pid:
                return {"is_late": True}
            slot.is_at_barrier = False
            start = {"worker_envs": self._starts[slot.number], "aggregate_worker_data": {}}
            return {"run": slot.run, "start": start}

    def _wait_for_fault(self, slot: Slot, after: int, wait_s: float) -> dict[str, Any]:
        with self._changed:
            if not self._until(lambda: slot.fault_run > after, wait_s):
                return {"is_late": True}
            return {"run": slot.fault_run, "restart_count": slot.fault_run - 1}

    def _until(self, condition: Callable[[], bool], wait_s: float) -> bool:
        return self._changed.wait_for(lambda: condition() or self._is_closed, wait_s) and not self._is_closed
