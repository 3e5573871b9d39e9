"""A stand-in for training scripts over the original's checkpointless library: its calls of the agent, in its order.

A rank waits for its place, then at the barrier, and runs a block of code that can be run again. A thread listens for faults. An
exception in the block is reported and leads back to the barrier, with the weights still in memory; the newest ones are everybody's.
The arguments are those of the launch manifests in tests/api/compat: how many steps, and the fault that the script makes itself.
It waits short of its end until the file `finish` is in $OUTPUT_DIR.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hyperpod_elastic_agent.ipc import HyperPodIPCException, RestartMode, TrainingManager

ARGUMENTS = dict(word.lstrip("+").split("=", 1) for word in sys.argv[1:] if "=" in word)
STEPS = int(ARGUMENTS["trainer.max_steps"])
FAULT = "callbacks.3.test_fault_config."
FAULT_RANKS = [int(rank) for rank in re.findall(r"\d+", ARGUMENTS[f"{FAULT}fault_ranks"])]
FAULT_AT = int(ARGUMENTS[f"{FAULT}steps_before_fault"])
FINISH = Path(os.environ["OUTPUT_DIR"], "finish")
SHORT_OF_END, PACE_S = 5, 0.05
CALLED_BACK = threading.Event()


class Training:
    """What outlives a fault: the number of steps made, and one weight for each of them."""

    def __init__(self) -> None:
        self.step = 0
        self.weights = torch.zeros(STEPS)

    def agree(self) -> None:
        """Take the newest state of any rank."""
        steps = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(steps, torch.tensor([self.step]))
        newest = max(map(int, steps))
        dist.broadcast(self.weights, src=list(map(int, steps)).index(newest))
        self.step = newest

    def make_step(self) -> None:
        """Make one, or only meet the others where the end must wait."""
        gradient = torch.tensor([1.0, float(FINISH.exists())])
        dist.all_reduce(gradient)
        mean, may_finish = (gradient / dist.get_world_size()).tolist()
        if self.step < STEPS - SHORT_OF_END or may_finish == 1.0:
            self.weights[self.step] += mean
            self.step += 1

    def is_whole(self) -> bool:
        return bool((self.weights[: self.step] == 1.0).all())


def set_ranks(message: tuple[str, dict[str, dict[str, str]]], expected: str) -> None:
    kind, body = message
    assert kind == expected, message
    os.environ.update(body["worker_envs"])


def listen(agent: TrainingManager) -> None:
    while True:
        try:
            kind, _ = agent.InProcessRestart.hyperpod_wait_fault(timeout=1)
        except HyperPodIPCException:
            continue
        if kind == "job_fault":
            CALLED_BACK.set()


def block(training: Training, made: list[int]) -> None:
    """The code that runs again."""
    # As with HPCT_USE_ROOTLESS: nobody opens a store for it.
    dist.init_process_group("gloo", timeout=timedelta(seconds=240))
    rank, seq = dist.get_rank(), int(os.environ["JOB_RESTART_COUNT"])
    held = training.step
    training.agree()
    say(f"run {seq} held {held} from {training.step}")
    while training.step < STEPS:
        if CALLED_BACK.is_set():
            raise RuntimeError("called back")
        if not seq and rank in FAULT_RANKS and training.step == FAULT_AT:
            raise ValueError("the fault that the arguments ask for")
        training.make_step()
        made[0] += 1
        time.sleep(PACE_S)
    say(f"finished {training.step} whole {training.is_whole()}")


def say(text: str) -> None:
    e = os.environ
    print(
        f"RANK {e['RANK']} of {e['WORLD_SIZE']} pid {os.getpid()} {text} rootless {e['HPCT_USE_ROOTLESS']}", flush=True
    )


def main() -> None:
    torch.set_num_threads(1)
    agent, training = TrainingManager(), Training()
    set_ranks(agent.InProcessRestart.hyperpod_wait_rank_info(), "job_rank_info")
    agent.InProcessRestart.hyperpod_notify_labels({"PP": "0"})
    threading.Thread(target=listen, args=(agent,), daemon=True).start()
    while True:
        set_ranks(agent.InProcessRestart.hyperpod_barrier(), "job_start")
        agent.InProcessRestart.hyperpod_past_rcb_barrier()
        CALLED_BACK.clear()
        made = [0]
        try:
            return block(training, made)
        except Exception as error:
            say(f"left: {error!r:.60}")
            mode = RestartMode.IN_PROCESS_RESTART if made[0] > 1 else RestartMode.PROCESS_LEVEL_RESTART
            if not CALLED_BACK.is_set():
                agent.InProcessRestart.hyperpod_send_fault(int(os.environ["RANK"]), mode)
            if dist.is_initialized():
                dist.destroy_process_group()


if __name__ == "__main__":
    main()
