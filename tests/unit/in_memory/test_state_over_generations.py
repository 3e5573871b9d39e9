"""`State` in ranks of their own processes, over generations, with one thread that plays their agents."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.inmemory_agents import AgentSocket
from tests.free_ports import free_port
from tests.patience import PATIENCE_S
from tests.unit.in_memory.forked_ranks import run_ranks
from tests.unit.in_memory.models import build
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastipod import ElasticBatches, State
from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.gradients import gradient_sync
from elastipod.in_memory import phase_limit, process_groups
from elastipod.in_memory.members import digest_of
from elastipod.in_memory.phases import LIMITS
from elastipod.ipc.protocol import SOCKET_ENV
from elastipod.local_worker import local_worker
from elastipod.worker_file import WORKER_FILE_ENV, EventLevel, WorkerFile

PLAN = ElasticBatches(dataset_size=48, global_batch=12, seed=1, epochs=2)
# The ranks need some steps to agree on one.
LONG_PLAN = ElasticBatches(dataset_size=48, global_batch=12, seed=1, epochs=12)
DATA = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
OVER_AT = 4  # the step in which the first generation ends


class Agents:
    """Starts one generation of these processes after the other. worlds: for each generation, its processes by rank."""

    def __init__(self, worlds: list[list[int]]) -> None:
        self.calls: list[tuple[str, int]] = []
        self._worlds = worlds
        self._ports = [free_port() for _ in worlds]
        self._at_barrier: dict[int, int] = {}  # the last generation that each process has left
        self._over = 0
        self._changed = threading.Condition()

    def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        process, name = int(call["local_rank"]), call["call"]
        with self._changed:
            self.calls.append((name, process))
            if name == "hello":
                return {"run": 0, "now": 0}
            if name == "barrier":
                self._at_barrier[process] = int(call["after"])
                self._changed.notify_all()
                return self._start(process, int(call["after"]), float(call["wait_s"]))
            if name == "fault":
                is_over = self._changed.wait_for(lambda: self._over > int(call["after"]), min(1.0, call["wait_s"]))
                return {"run": self._over, "restart_count": 0} if is_over else {"is_late": True}
            if name == "send_fault":
                self._over = max(self._over, int(call["run"]))
                self._changed.notify_all()
        return {"env": {}} if name == "keep" else {}

    def _start(self, process: int, after: int, wait_s: float) -> dict[str, Any]:
        numbers = [at for at, world in enumerate(self._worlds, start=1) if process in world and at > after]
        if not numbers or not self._changed.wait_for(lambda: self._is_due(numbers[0]), min(1.0, wait_s)):
            return {"is_late": True}
        world = self._worlds[numbers[0] - 1]
        envs = {
            "RANK": str(world.index(process)), "WORLD_SIZE": str(len(world)), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._ports[numbers[0] - 1]), "ELASTIPOD_GENERATION": str(numbers[0]),
        }  # fmt: skip
        return {"run": numbers[0], "start": {"worker_envs": envs, "aggregate_worker_data": {}}}

    def _is_due(self, number: int) -> bool:
        """Whether all processes of a generation wait for it, and the one before is over."""
        former = self._worlds[number - 2] if number > 1 else []
        is_over = self._over >= number - 1 or all(self._at_barrier.get(each) == number - 1 for each in former)
        return is_over and all(each in self._at_barrier for each in self._worlds[number - 1])


class Job:
    """Runs processes of one job; `train` is their script. has_own_pods: each process in a pod of its own, instead of one for all."""

    def __init__(self, folder: Path, agents: Agents, *, has_own_pods: bool = False) -> None:
        self.folder = folder
        self.agents = agents
        self._has_own_pods = has_own_pods

    def run(self, body: Callable[[int], Any], number: int) -> list[Any]:
        path = str(self.folder / "socket")
        num_pods = number if self._has_own_pods else 1
        files = [WorkerFile.create(self.folder / f"workers-{pod}", number) for pod in range(num_pods)]
        server = AgentSocket(path, self.agents.answer)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})

        def process(at: int) -> Any:
            os.environ |= {
                SOCKET_ENV: path,
                "ELASTIPOD_LOCAL_RANK": str(at),
                "RANK": "-1",
                WORKER_FILE_ENV: str(files[at % num_pods].path),
            }
            return body(at)

        try:
            return run_ranks(number, process, thread.start)
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
            for file in files:
                file.close()

    def train(
        self,
        process: int,
        in_step: Callable[[State, int], None] = lambda state, step: None,
        plan: ElasticBatches = PLAN,
        reduced: Callable[[State, int], None] = lambda state, step: None,
        checkpoint_every: int = 0,
    ) -> list[Any]:
        """Train a plan; give each generation with its rank, size and first step, and the digest of the end.

        in_step, reduced: called in each step, before its passes and when its gradients are there.
        """
        state = State(
            lambda: build(process),
            wrap=DistributedDataParallel,
            sample_log=self.folder / "samples",
            checkpoints=self.folder / "checkpoints",
            checkpoint_every=checkpoint_every,
        )
        worlds: list[list[int]] = []
        for step in state.steps(plan):
            with step as batch:
                if not worlds or worlds[-1][0] != state.generation:
                    worlds.append([state.generation, state.rank, state.world_size, batch.step])
                in_step(state, batch.step)
                loss = loss_of(state.model, batch.indices) * batch.weight
                loss.backward()  # type: ignore[no-untyped-call]
                reduced(state, batch.step)
        return [worlds, state.completed, digest_of(state._members.digests())]


def loss_of(model: nn.Module, indices: Any) -> torch.Tensor:
    loss: torch.Tensor = model(DATA[list(indices)]).square().mean()
    return loss


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ranks of a busy machine the time to connect."""
    limits = {phase: None for phase in LIMITS} | {phase: limit and limit * 24 for phase, limit in LIMITS.items()}
    monkeypatch.setattr(process_groups, "TRY_S", 20.0)
    monkeypatch.setattr(process_groups, "CONNECT_S", PATIENCE_S)
    monkeypatch.setattr(phase_limit, "LIMITS", limits)


def end_when_reduced(folder: Path, state: State, step: int) -> None:
    """Have the agents call all ranks back when all have the gradients of a step: it is complete all the same.

    Before that the call would shut down the connections that a peer still reads from.
    """
    link = state._world.link
    if link is not None and state.generation == 1 and step == OVER_AT:
        (folder / f"reduced-{state.rank}").touch()
        until = time.monotonic() + PATIENCE_S
        while len(list(folder.glob("reduced-*"))) < state.world_size:
            assert time.monotonic() < until, "the other rank has no gradients"
            time.sleep(0.01)
        link.report_fault(state.rank, "asked to by the test")
        assert link.wait_until_over(PATIENCE_S)


def test_ranks_that_are_called_back_go_on_with_a_newcomer_after_the_step_that_they_completed(tmp_path: Path) -> None:
    job = Job(tmp_path, Agents([[0, 1], [1, 0, 2]]))
    found = job.run(lambda process: job.train(process, reduced=partial(end_when_reduced, tmp_path)), 3)
    first, second = OVER_AT + 1, 2
    assert [each[0] for each in found] == [
        [[1, 0, 2, 1], [second, 1, 3, first]],
        [[1, 1, 2, 1], [second, 0, 3, first]],
        [[second, 2, 3, first]],
    ]
    assert [each[1] for each in found] == [PLAN.total_steps] * 3
    assert len({each[2] for each in found}) == 1
    assert audit(read_logs(tmp_path / "samples")).exact
    assert job.agents.calls.count(("keep", 0)) == 1
    assert [name for name, _ in job.agents.calls].count("past_barrier") == 5


def test_a_rank_whose_peer_broke_repeats_its_step_with_a_newcomer(tmp_path: Path) -> None:
    job = Job(tmp_path, Agents([[0, 1], [0, 2]]))
    counted_wrongly: list[int] = []

    def break_at_step(state: State, step: int) -> None:
        (statistics,) = [each for name, each in state.model.named_buffers() if name.endswith("num_batches_tracked")]
        counted_wrongly.extend([step] * (int(statistics) != step - 1))
        if state.generation == 1 and state.rank == 1 and step == OVER_AT:
            link = state._world.link
            assert link is not None
            state.model(DATA[:4])  # so that the other rank comes to its backward pass
            link.report_fault(1, "broke")
            raise ZeroDivisionError

    def body(process: int) -> Any:
        if process == 1:
            with pytest.raises(ZeroDivisionError):
                job.train(process, break_at_step)
            return []
        return [*job.train(process, break_at_step), counted_wrongly]

    found = job.run(body, 3)
    assert found[0][3] == found[2][3] == [], "a BatchNorm has counted the samples of the interrupted step"
    assert found[0][0] == [[1, 0, 2, 1], [2, 0, 2, OVER_AT]]
    assert found[2][0] == [[2, 1, 2, OVER_AT]]
    assert found[0][1:] == found[2][1:]
    assert found[0][1] == PLAN.total_steps
    assert audit(read_logs(tmp_path / "samples")).exact


def test_a_rank_whose_peer_broke_does_not_go_on_with_passes_that_need_no_peer(tmp_path: Path) -> None:
    """Passes that reduce nothing have no collective that fails, and a step may have many of them."""
    job = Job(tmp_path, Agents([[0, 1], [0, 2]]))
    begun_without_world: list[int] = []
    accumulates = tmp_path / "accumulates"

    def accumulate(state: State, step: int) -> None:
        if state.generation > 1 or step != OVER_AT:
            return
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            link = state._world.link
            assert link is not None
            if state.rank == 1 and accumulates.exists():  # before that the other rank may still reduce the step before
                link.report_fault(1, "broke")
                raise ZeroDivisionError
            begun_without_world.extend([step] * state._world.is_aborted)
            with gradient_sync(state.model, False):
                loss_of(state.model, range(4)).backward()  # type: ignore[no-untyped-call]
            if state.rank == 0:
                accumulates.touch()

    def body(process: int) -> Any:
        if process == 1:
            with pytest.raises(ZeroDivisionError):
                job.train(process, accumulate)
            return []
        return [*job.train(process, accumulate), begun_without_world]

    found = job.run(body, 3)
    assert found[0][0] == [[1, 0, 2, 1], [2, 0, 2, OVER_AT]]
    assert found[2][0] == [[2, 1, 2, OVER_AT]]
    assert len(found[0][3]) <= 1, "the pass that began after the end was the last one"
    assert found[0][1:3] == found[2][1:3]
    assert found[0][1] == PLAN.total_steps
    assert audit(read_logs(tmp_path / "samples")).exact


@pytest.mark.parametrize(
    ("leaves", "kept", "is_saved"),
    [
        pytest.param(False, None, False, id="this pod stays", marks=pytest.mark.slow),
        pytest.param(None, True, False, id="processes are kept"),
        pytest.param(True, True, True, id="this pod leaves"),
        pytest.param(None, None, True, id="nobody knows", marks=pytest.mark.slow),
    ],
)
def test_a_planned_stop_needs_a_checkpoint_only_when_nobody_stays(
    tmp_path: Path, leaves: bool | None, kept: bool | None, is_saved: bool
) -> None:
    """Both ranks are in one pod here, and both go on in the next generation."""
    job = Job(tmp_path, Agents([[0, 1], [0, 1]]))

    def drain_at_step(state: State, step: int) -> None:
        worker = local_worker()
        assert worker is not None
        if state.generation == 1 and step == OVER_AT and state.rank == 0:
            worker.file.set_event(EventLevel.DRAIN, time.time() + PATIENCE_S, leaves=leaves, kept=kept)
        if state.generation == 2:
            worker.file.set_event(EventLevel.NONE)
            checkpoints = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
            assert bool(checkpoints) is is_saved, checkpoints

    found = job.run(lambda process: job.train(process, drain_at_step, LONG_PLAN), 2)
    (first, second), (other_first, other_second) = found[0][0], found[1][0]
    assert (first, other_first) == ([1, 0, 2, 1], [1, 1, 2, 1])
    assert second[3] == other_second[3]
    assert OVER_AT < second[3] <= LONG_PLAN.total_steps
    assert found[0][1:] == found[1][1:]
    assert found[0][1] == LONG_PLAN.total_steps
    assert audit(read_logs(tmp_path / "samples")).exact


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [False, None], ids=["its pod stays", "its process is kept"])
def test_neither_training_nor_a_planned_change_waits_for_storage_that_hangs(
    tmp_path: Path, leaves: bool | None
) -> None:
    """The first save of the first generation ends in the second one; the ranks' processes ended themselves before it did."""
    job = Job(tmp_path, Agents([[0, 1], [0, 1]]))
    create_file = DirectoryStore.create_file
    is_quick = threading.Event()  # of each process
    drained_at = OVER_AT + 1  # after the next checkpoint was due

    def hanging(self: DirectoryStore, *arguments: Any) -> Any:
        assert is_quick.wait(PATIENCE_S)
        return create_file(self, *arguments)

    def drain_at_step(state: State, step: int) -> None:
        worker = local_worker()
        assert worker is not None
        if state.generation == 1 and step == drained_at and state.rank == 0:
            worker.file.set_event(EventLevel.DRAIN, time.time() + PATIENCE_S, leaves=False)
        if state.generation == 2 and not is_quick.is_set():
            worker.file.set_event(EventLevel.NONE)
            assert list((tmp_path / "checkpoints").glob("step-*")) == []
            is_quick.set()

    def body(process: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DirectoryStore, "create_file", hanging)
            return job.train(process, drain_at_step, LONG_PLAN, checkpoint_every=2)

    found = job.run(body, 2)
    assert [each[0][0] for each in found] == [[1, 0, 2, 1], [1, 1, 2, 1]]
    assert found[0][0][1][3] == found[1][0][1][3] > drained_at, "both go on in memory, after the same step"
    assert [each[1] for each in found] == [LONG_PLAN.total_steps] * 2
    of_gen_2 = [path.name for path in (tmp_path / "checkpoints").glob("step-*-gen-000002")]
    assert f"step-{LONG_PLAN.total_steps:010d}-gen-000002" in of_gen_2
    assert audit(read_logs(tmp_path / "samples")).exact
