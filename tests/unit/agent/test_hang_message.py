"""What a hang's message says."""

from __future__ import annotations

import pytest

from elastipod_agent.core.hang import Hang, SilentWorker
from elastipod_agent.core.hang_message import WorkerActivity, cut, hang_message, main_thread

STUCK = """\
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f00 (most recent call first):
  File "/work/data/loader.py", line 12 in read_shard
  File "train.py", line 40 in <module>
"""
WAITING = """\
Thread 0x00007f00 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 2806 in all_reduce
  File "train.py", line 33 in <module>
"""


def hang(*stands: tuple[int, int]) -> Hang:
    silent = tuple(SilentWorker(rank, step, 1_700_000_000.0 + rank, 612.4 + rank) for rank, step in stands)
    return Hang(silent, 600.0, 0.41)


def test_the_one_who_differs_comes_first() -> None:
    accounts = [WorkerActivity(8 + rank, STUCK if rank == 2 else WAITING) for rank in range(4)]
    said = hang_message(hang(*[(rank, 100) for rank in range(4)]), {rank: 8 + rank for rank in range(4)}, accounts)
    assert said.splitlines() == [
        "no step for 615 s (limit 600 s; a step usually takes 0.41 s): ranks 8-11 stand at step 100 "
        "since 2023-11-14T22:13:20Z",
        "rank 10 in the main thread, innermost call first (1 more thread in the log):",
        "  read_shard (work/data/loader.py:12)",
        "  <module> (train.py:40)",
        "ranks 8-9,11 in the main thread, innermost call first:",
        "  all_reduce (torch/distributed/distributed_c10d.py:2806)",
        "  <module> (train.py:33)",
    ]


def test_the_one_who_is_behind_comes_before_one_who_differs() -> None:
    accounts = [WorkerActivity(0, STUCK), WorkerActivity(1, WAITING), WorkerActivity(2, WAITING)]
    said = hang_message(hang((0, 101), (1, 100), (2, 100)), {rank: rank for rank in range(3)}, accounts)
    assert "ranks 1-2 stand at step 100 since 2023-11-14T22:13:21Z; rank 0 stands at step 101" in said
    assert said.index("ranks 1-2 in the") < said.index("rank 0 in the")


def test_of_ranks_without_a_step_in_this_generation_no_step_is_named() -> None:
    silent = [SilentWorker(rank, 5 - rank, 1_700_000_000.0, 6.0, has_reported=rank == 2) for rank in range(3)]
    accounts = [WorkerActivity(2, WAITING), WorkerActivity(0, STUCK), WorkerActivity(1, STUCK)]
    said = hang_message(Hang(tuple(silent), 5.0, None), {rank: rank for rank in range(3)}, accounts)
    assert said.splitlines()[0] == (
        "no step for 6 s (limit 5 s): ranks 0-1 have made no step in this generation; rank 2 stands at step 3 since "
        "2023-11-14T22:13:20Z"
    )
    assert said.index("ranks 0-1 in the") < said.index("rank 2 in the")
    alone = hang_message(Hang(tuple(silent[:1]), 5.0, None), {0: 0}, [])
    assert alone == "no step for 6 s (limit 5 s): rank 0 has made no step in this generation"


def test_without_stacks_the_facts_stand_there_and_who_never_reported_comes_last() -> None:
    accounts = [WorkerActivity(0, facts="offers no stacks; process 7 is gone"), WorkerActivity(1, STUCK)]
    said = hang_message(hang((1, 5)), {0: 0, 1: 1}, accounts).splitlines()
    assert said[-1] == "rank 0 offers no stacks; process 7 is gone"


def test_long_stacks_keep_their_inner_calls() -> None:
    deep = "Thread 0x1 (most recent call first):\n" + "".join(f'  File "a.py", line {n} in f{n}\n' for n in range(40))
    frames = main_thread(deep)
    assert frames[0] == "  f0 (a.py:0)"
    assert frames[-1] == "  ... 28 outer frames"
    assert len(frames) == 13


def test_how_a_forked_worker_began_is_left_out() -> None:
    forked = (
        STUCK
        + '  File "/x/elastipod_agent/fork_server/program.py", line 75 in _run_file\n  File "boot.py", line 1 in <module>\n'
    )
    assert main_thread(forked) == main_thread(STUCK)


@pytest.mark.parametrize("text", ["", "garbage", "Thread 0x1 (most recent call first):", "  <no Python frame>"])
def test_any_text_is_borne(text: str) -> None:
    main_thread(text)


def test_a_cut_keeps_the_beginning() -> None:
    assert cut("short", 10) == "short"
    text = cut("ä" * 100, 51)
    assert len(text.encode()) <= 51
    assert text.startswith("ä" * 20)
    assert text.endswith("\n...")
