"""Ranks of a test: a fork of this process for each, so that torch is loaded already, with real process groups among them."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.patience import PATIENCE_S

# The first backward pass of a process decides for good whether autograd has threads, which no fork has. Where it is that of a sharded
# model, it has them, and forks cannot compute gradients.
torch.zeros(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
# The first optimizer loads all of torch.compile, which takes seconds: once here, and not in every fork.
torch.optim.SGD([torch.zeros(1)])


def run_ranks(number: int, body: Callable[[int], Any], once_forked: Callable[[], object] = lambda: None) -> list[Any]:
    """Run ``body`` with each rank in a process of its own; give what they returned, by rank, as it comes out of JSON.

    once_forked: starts threads that the ranks need, which must not run while this process is forked. Fails with the tracebacks of
    the ranks that raised.
    """
    pipes, children = [], []
    for rank in range(number):
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            _be_rank(rank, body, writing)
        os.close(writing)
        pipes.append(reading)
        children.append(pid)
    once_forked()
    try:
        texts = [_read(reading) for reading in pipes]
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    answers = [json.loads(text) if text else {"raised": "nothing was said"} for text in texts]
    raised = {rank: each["raised"] for rank, each in enumerate(answers) if "raised" in each}
    assert not raised, "\n".join(f"rank {rank}: {text}" for rank, text in raised.items())
    return [each["value"] for each in answers]


def _be_rank(rank: int, body: Callable[[int], Any], writing: int) -> None:
    try:
        gc.freeze()  # garbage of the tests before may hold process groups, whose threads this fork has not got: their end would hang
        # A rank that hangs says where, also when a thread holds Python's lock; the ranks that wait for it fail then.
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True, file=2)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)  # a fork has none of the threads that torch computed with
        try:
            answer = {"value": body(rank)}
        except BaseException:
            answer = {"raised": traceback.format_exc()}
        os.write(writing, json.dumps(answer).encode())
        os.close(writing)
        sys.stdout.flush()
        signal.pause()  # until all have answered: the end of a process ends its connections and its store
    finally:
        os._exit(1)


def _read(reading: int) -> str:
    with open(reading, encoding="utf-8") as pipe:
        return pipe.read()


@contextmanager
def world(rank: int, size: int, port: int) -> Iterator[None]:
    """Be a rank of a world that meets at a port of this host."""
    limit = timedelta(seconds=PATIENCE_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=limit, wait_for_workers=False)  # type: ignore[attr-defined]
    _stores.append(store)  # others may still be reading it when this rank has left
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    yield
    dist.destroy_process_group()


_stores: list[Any] = []


def raised_by(action: Callable[[], Any]) -> list[str]:
    """Give the type and the text of what an action raises; nothing when it does not raise."""
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []
