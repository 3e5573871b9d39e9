"""A script for two ranks that times what the library does in every step, call by call, beside an all-reduce of one number.

Rank 0 writes `<folder>/calls.json`: for each kind of call the seconds of all its calls, in their order.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elastipod import elastic_event_detected, report

CALLS = 2_000
WARM_UP = 200  # calls that do not count: connections are made, code is loaded
PACE_S = 0.002  # between steps, so that what runs beside the script, such as the agreement's thread, gets its turns
EVENT_CHECK, REPORT, ALL_REDUCE = "event check", "report", "all-reduce"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    one = torch.ones(1)
    taken: dict[str, list[float]] = {EVENT_CHECK: [], REPORT: [], ALL_REDUCE: []}
    for step in range(1, WARM_UP + CALLS + 1):
        time.sleep(PACE_S)
        dist.barrier()  # else the all-reduce would count how much later the other rank woke up
        began = time.perf_counter()
        dist.all_reduce(one)
        reduced = time.perf_counter()
        is_asked_to_leave = elastic_event_detected()
        checked = time.perf_counter()
        report(step, step, 0.5)
        reported = time.perf_counter()
        if is_asked_to_leave:
            raise SystemExit("nobody was to ask for an end")
        if step > WARM_UP:
            taken[ALL_REDUCE].append(reduced - began)
            taken[EVENT_CHECK].append(checked - reduced)
            taken[REPORT].append(reported - checked)
    if dist.get_rank() == 0:
        path = Path(os.environ["BENCH_FOLDER"], "calls.json")
        path.with_suffix(".new").write_text(json.dumps(taken))
        path.with_suffix(".new").replace(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
