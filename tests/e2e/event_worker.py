"""A worker that does nothing but steps with a collective, until the ranks agree to stop; prints the call of its stop.

Started by test_training_processes.py with torchrun's environment variables.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from elastipod import elastic_event_detected


def main() -> None:
    dist.init_process_group("gloo")
    deadline = time.monotonic() + 600
    step = 0
    while time.monotonic() < deadline:
        dist.all_reduce(torch.ones(1))
        step += 1
        if dist.get_rank() == step % dist.get_world_size():
            time.sleep(0.003)  # the straggler changes: ranks are never at the same line
        if step == 3:
            print("steps are made", flush=True)
        if elastic_event_detected():
            print(f"stopped at {step}", flush=True)
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    assert os.environ["WORLD_SIZE"]
    main()
