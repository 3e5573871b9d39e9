"""A newcomer that follows before it joins, in ranks of their own processes, with one thread that plays their agents."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE_S
from tests.unit.in_memory.test_state_over_generations import Agents, Job, patient  # noqa: F401 a fixture

from elastipod import ElasticBatches, State
from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit
from elastipod.in_memory import state_transfer
from elastipod.in_memory.agent_link import AgentLink
from elastipod.ipc.protocol import FOLLOWED_STORE_ENV, WORKER_KEY_ENV
from elastipod.local_worker import local_worker
from elastipod.worker_file import EventLevel

NEWCOMER = 2
# With slow steps, long enough for the newcomer to come to the barrier meanwhile.
LONG_PLAN = ElasticBatches(dataset_size=48, global_batch=12, seed=1, epochs=25)
STEP_S = 0.1


class PreparingAgents(Agents):
    """Have the newcomer follow the first generation."""

    def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        answer = super().answer(call)
        if call["call"] != "keep":
            return answer
        is_newcomer = int(call["local_rank"]) == NEWCOMER
        store = {FOLLOWED_STORE_ENV: f"127.0.0.1:{self._ports[0]}"} if is_newcomer else {}
        return {"env": {WORKER_KEY_ENV: "a key", **store}}


@pytest.mark.slow
def test_a_newcomer_that_has_followed_gets_only_what_gradients_do_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are buffers and averages."""
    at_barrier, sent, trains = tmp_path / "at-barrier", tmp_path / "sent", tmp_path / "trains"
    dealt_out, park = state_transfer.dealt_out, AgentLink.park

    def noted(manifest: Any, lacking: Any, donors: Any) -> Any:
        if os.environ["ELASTIPOD_LOCAL_RANK"] == str(NEWCOMER):
            sent.write_text(" ".join(shape.key for shape in lacking))
        return dealt_out(manifest, lacking, donors)

    def noted_park(link: AgentLink, **options: Any) -> Any:
        if os.environ["ELASTIPOD_LOCAL_RANK"] == str(NEWCOMER):
            at_barrier.touch()
        return park(link, **options)

    monkeypatch.setattr(state_transfer, "dealt_out", noted)
    monkeypatch.setattr(AgentLink, "park", noted_park)

    def train(state: State, step: int) -> None:
        worker = local_worker()
        assert worker is not None
        if state.generation == 2:
            worker.file.set_event(EventLevel.NONE)
        elif at_barrier.exists() and state.rank == 0:
            worker.file.set_event(EventLevel.DRAIN, time.time() + PATIENCE_S, leaves=None, kept=True)
        else:
            trains.touch()
            time.sleep(STEP_S)

    job = Job(tmp_path, PreparingAgents([[0, 1], [0, 1, NEWCOMER]]))

    def body(process: int) -> Any:
        if process == NEWCOMER:
            os.environ["ELASTIPOD_GENERATION"] = "1"
            _until_there_is(trains)
        return job.train(process, train, LONG_PLAN)

    found = job.run(body, 3)
    assert len({each[2] for each in found}) == 1
    assert [each[1] for each in found] == [LONG_PLAN.total_steps] * 3
    assert found[NEWCOMER][0][0][3] == found[0][0][1][3], "no step is repeated"
    assert audit(read_logs(tmp_path / "samples")).exact
    keys = sent.read_text().split()
    moments = [key for key in keys if key.startswith("optimizer.")]
    weights = [key for key in keys if key in ("model.0.weight", "model.1.bias", "model.2.weight")]
    assert (len(moments), len(weights)) == (0, 0), keys
    assert {"model.1.running_mean", "ema.module.0.weight"} <= set(keys)


def _until_there_is(file: Path) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert time.monotonic() < limit
        time.sleep(0.02)
