"""Rank 0 of one generation, without torch: makes steps, and logs each of them in a tracker."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from elastipod.elastic_event import elastic_event_detected

STEP_S = 0.05


def main() -> None:
    """Make steps until the last one, an event, or the fault that was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tracker", choices=("mlflow", "wandb"))
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--last", type=int, default=10**6)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--leave-at", type=int, help="make no further step, and wait for the event")
    args = parser.parse_args()
    if args.tracker == "mlflow":
        from elastipod.integrations.mlflow import mlflow_run

        tracked = mlflow_run("llm")
    else:
        from elastipod.integrations.wandb import wandb_run

        tracked = wandb_run("llm")
    elastic_event_detected()
    with tracked as run:
        for step in range(args.first, args.last + 1):
            run.log(step, loss=1.0 / step)
            if step == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == args.fail_at:
                raise ValueError("boom")
            print(f"step {step}", flush=True)
            while not (is_told := elastic_event_detected()) and step == args.leave_at:
                time.sleep(STEP_S)
            if is_told:
                print("leaving", flush=True)
                sys.exit(0)
            time.sleep(STEP_S)


main()
