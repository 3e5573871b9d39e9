"""Check the node of a pod before its workers start, in at most 5 s: its GPUs answer, memory is free, the pod of rank 0 can be reached.

    hyperpodrun --pre-train-script=check_node.py --pre-train-args="--gpus=8 --memory-gib=64" train.py

When something is wrong, it prints one sentence and exits with 1. The start fails with this sentence, and the job counts a fault against
the node.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys

LIMIT_S = 5
LINK_LIMIT_S = 2.0
AGENT_PORT = 8080


def check_gpus(wanted: int) -> str:
    """Say what is wrong with the GPUs; empty when as many as wanted answer."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError as error:
        return f"nvidia-smi cannot be run: {error.strerror}"
    found = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    if listed.returncode or found < wanted:
        return (
            f"{found} of {wanted} GPUs answer (nvidia-smi -L, exit code {listed.returncode}): {listed.stderr.strip()}"
        )
    return ""


def check_memory(wanted_gib: float) -> str:
    """Say what is wrong with the memory; empty when as much as wanted is available."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        (kib,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return "" if kib / 2**20 >= wanted_gib else f"{kib / 2**20:.1f} GiB of memory are available, not {wanted_gib:g}"


def check_link(host: str, port: int) -> str:
    """Say what is wrong with the network; empty when the agent of rank 0 can be reached."""
    try:
        socket.create_connection((host, port), timeout=LINK_LIMIT_S).close()
    except OSError as error:
        return f"the agent of rank 0 at {host}:{port} cannot be reached: {error}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpus", type=int, default=0, help="how many must answer; 0: not checked")
    parser.add_argument("--memory-gib", type=float, default=0, help="how much must be available; 0: not checked")
    parser.add_argument("--port", type=int, default=AGENT_PORT, help="of the agents")
    options = parser.parse_args()
    doing = "checks"

    def give_up(number: int, frame: object) -> None:
        print(f"{node}: its {doing} did not end within {LIMIT_S} s", file=sys.stderr, flush=True)
        os._exit(1)  # a call to a broken driver may never return

    node = f"node {os.environ.get('NODE_NAME', socket.gethostname())}"
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT_S)
    doing = "check of GPUs"
    wrong = check_gpus(options.gpus) if options.gpus else ""
    doing = "check of memory"
    wrong = wrong or check_memory(options.memory_gib)
    doing = "check of the network"
    if not wrong and os.environ.get("MASTER_ADDR"):
        wrong = check_link(os.environ["MASTER_ADDR"], options.port)
    if wrong:
        print(f"{node}: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
