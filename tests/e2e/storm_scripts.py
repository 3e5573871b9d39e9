"""Training scripts for storms: workers with children, threads that wait for the agent, lines and reports."""

from __future__ import annotations

# What all workers do besides training: a child near and one far, a thread that waits for the agent, lines and reports.
_LIFE = """
import os, subprocess, sys, threading, time
from pathlib import Path
from elastipod.worker_file import WorkerFile
from hyperpod_elastic_agent.ipc import HyperPodIPCException, InProcessRestartSocketClient, RestartMode

local_rank = int(os.environ["LOCAL_RANK"])
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
page = WorkerFile.open(os.environ["ELASTIPOD_WORKER_FILE"])
agent = InProcessRestartSocketClient()

def is_over(generation):
    return (Path(os.environ["HOME"]) / f"over-{generation}").exists()

def step(number):
    page.report(local_rank, step=number, samples=number, loss=0.5, world_size=int(os.environ["WORLD_SIZE"]))
    if number % 20 == 1:
        print("loss:", 1 / number, flush=True)

def leave():
    for child in children:
        child.kill()
        child.wait()
    sys.exit(0)
"""
PLAIN = (
    _LIFE
    + """
def wait():
    while True:
        try:
            agent.hyperpod_wait_fault(timeout=1)
        except HyperPodIPCException:
            pass

generation = os.environ["ELASTIPOD_GENERATION"]
rank = int(os.environ["RANK"])
threading.Thread(target=wait, daemon=True).start()
agent.hyperpod_send_data(rank, "data")
print("run", generation, "rank", rank, flush=True)
number = 0
while page.event().level == 0 and not is_over(generation):
    number += 1
    step(number)
    time.sleep(0.01)
if page.event().level:
    page.acknowledge(local_rank)
leave()
"""
)
STANDING = (
    _LIFE
    + """
def train(generation):
    number = 0
    while True:
        try:
            agent.hyperpod_wait_fault(timeout=0.02)
            return
        except HyperPodIPCException:
            pass
        if page.event().level:
            page.acknowledge(local_rank)
            return
        if is_over(generation):
            leave()
        number += 1
        step(number)

while True:
    kind, start = agent.hyperpod_barrier()
    os.environ.update(start["worker_envs"])
    agent.hyperpod_past_rcb_barrier()
    rank = int(os.environ["RANK"])
    agent.hyperpod_send_data(rank, "data")
    print("run", os.environ["ELASTIPOD_GENERATION"], "rank", rank, flush=True)
    train(os.environ["ELASTIPOD_GENERATION"])
"""
)
TORCH = (
    """
import torch, torch.distributed as dist
from hyperpod_elastic_agent.elastic_event_handler import elastic_event_detected
"""
    + _LIFE
    + """
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
generation, number = os.environ["ELASTIPOD_GENERATION"], 0
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
print("run", generation, "rank", dist.get_rank(), flush=True)
while not elastic_event_detected():
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    number += 1
    step(number)
    over = torch.tensor([float(is_over(generation))])
    dist.all_reduce(over)
    if over.item():
        break
dist.destroy_process_group()
leave()
"""
)
