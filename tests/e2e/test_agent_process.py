"""The agent as a real process, driven over HTTP as the operator does, with real workers and no Kubernetes."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.agent_client import free_port, until
from tests.agent_scenarios import check_fences, check_plain_protocol
from tests.e2e.agent_process import PACKAGES, AgentProcess, until_gone
from tests.nonempty import some
from tests.patience import PATIENCE_S

SAY_RANK = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"

# Reports its pid, then waits for the level in the worker file as the library does, and drains or ignores it.
POLL = """
import os, sys, time
from elastipod.worker_file import WorkerFile
rank = int(os.environ["LOCAL_RANK"])
page = WorkerFile.open(os.environ["ELASTIPOD_WORKER_FILE"])
page.report(rank, step=7, samples=70, loss=0.5, total_steps=100, world_size=int(os.environ["WORLD_SIZE"]))
print("pid", os.getpid(), "gen", os.environ["ELASTIPOD_GENERATION"], "nnodes", os.environ["NNODES"], flush=True)
while "ignore" in sys.argv or page.event().level == 0:
    time.sleep(0.01)
page.acknowledge(rank)
print("draining", flush=True)
"""

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("sum", total.item(), flush=True)
dist.destroy_process_group()
"""

ELASTIC = """
import time
import torch.distributed as dist
from hyperpod_elastic_agent.elastic_event_handler import elastic_event_detected
dist.init_process_group("gloo")
step = 0
while not elastic_event_detected():
    step += 1
    if step == 3:
        print("training", flush=True)
    time.sleep(0.01)
print("stopped after", step, flush=True)
"""

# A child in its process group, a child in a session of its own, and an orphan that has forgotten its parent.
FAMILY = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
near = subprocess.Popen(sleep)
far = subprocess.Popen(sleep, start_new_session=True)
middle = os.fork()
if middle == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, sleep)
    os._exit(0)
os.waitpid(middle, 0)
print("family", near.pid, far.pid, flush=True)
time.sleep(600)
"""

RunAgent = Callable[..., AgentProcess]


@pytest.fixture
def run_agent(tmp_path: Path) -> Iterator[RunAgent]:
    """Start agents whose workers run a script; at the end they leave and nothing of theirs is left."""
    agents: list[AgentProcess] = []

    def run(script: str, *arguments: str, script_args: tuple[str, ...] = (), **options: Any) -> AgentProcess:
        path = tmp_path / "train.py"
        path.write_text(script, "utf-8")
        agent = AgentProcess(tmp_path, [*arguments, str(path), *script_args], **options)
        agents.append(agent)
        until(agent.answers, "the agent's server")
        agent.until("ready")
        return agent

    yield run
    for agent in agents:
        agent.end()
    until_gone(p for p in psutil.process_iter(["environ"]) if f"HOME={tmp_path}" in _environment(p))


def _environment(process: psutil.Process) -> list[str]:
    return [f"{name}={value}" for name, value in (process.info["environ"] or {}).items()]


def worker_pids(agent: AgentProcess) -> list[int]:
    """Give the pids that POLL's workers have printed."""
    return [int(pid) for pid in re.findall(r"pid (\d+)", agent.printed())]


def test_two_pods_train_together_and_complete(run_agent: RunAgent) -> None:
    agents = [run_agent(ALL_REDUCE), run_agent(ALL_REDUCE)]
    port = free_port()
    for rank, agent in enumerate(agents):
        assert agent.start(1, rank=rank, nnodes=2, master_port=str(port)) == (200, None)
    for rank, agent in enumerate(some(agents)):
        seen = agent.until("completed")
        assert seen["drained"] is False
        assert seen["failure"] is None
        assert f"group_rank={rank}" in agent.printed()
        assert "\n[default0]:sum 3.0\n" in agent.printed()


def test_an_event_at_one_pod_drains_the_job_at_the_same_step(run_agent: RunAgent) -> None:
    agents = [run_agent(ELASTIC), run_agent(ELASTIC)]
    port = free_port()
    for rank, agent in enumerate(agents):
        agent.start(1, rank=rank, nnodes=2, master_port=port)
    for agent in agents:
        agent.until_printed("training")
    agents[1].drain(1)
    for agent in agents:
        until(partial(_has_drained, agent), "the drain of both pods")
    steps = {re.findall(r"stopped after (\d+)", agent.printed())[0] for agent in agents}
    assert len(steps) == 1


def _has_drained(agent: AgentProcess) -> bool:
    return agent.status()["drained"] is True


def test_a_killed_worker_is_a_fault_at_once_and_the_next_generation_runs(run_agent: RunAgent) -> None:
    agent = run_agent(POLL, "--nproc-per-node=2")
    assert agent.start(1)[0] == 200
    agent.until_printed("pid", 2)
    before = agent.status()
    assert before["worker"]["step"] == 7
    assert before["worker"]["world_size"] == 2
    assert before["worker"]["total_steps"] == 100
    victim = worker_pids(agent)[0]
    os.kill(victim, signal.SIGKILL)
    _, seen = agent.call("GET", f"/status?after={before['version']}&wait={PATIENCE_S}")
    assert seen["status"] == "faulted", "the exit itself is told, before anybody asks again"
    assert seen["reason"] == "WorkerCrash"
    assert seen["failure"]["signal"] == "SIGKILL"
    assert seen["failure"]["exitcode"] is None
    assert seen["version"] > before["version"]
    assert agent.start(2)[0] == 409, "a faulted agent is stopped first"
    assert agent.stop(1)[0] == 200
    assert agent.until("ready")["drained"] is False
    assert agent.start(2)[0] == 200
    agent.until_printed("gen 2", 2)
    assert agent.status()["failure"] is None


def test_an_exception_is_reported_with_its_traceback(run_agent: RunAgent) -> None:
    agent = run_agent("def train():\n    raise KeyError('lr')\ntrain()\n")
    agent.start(1)
    failure = agent.until("faulted")["failure"]
    assert failure["exitcode"] == 1
    assert failure["global_rank"] == 0
    assert failure["message"].startswith("rank 0 (local rank 0) ended with exit code 1")
    assert failure["message"].endswith("KeyError: 'lr'")
    assert "Traceback" in failure["message"]
    assert agent.end() == 1


def test_a_graceful_stop_drains(run_agent: RunAgent) -> None:
    agent = run_agent(POLL, "--nproc-per-node=2")
    agent.start(1)
    agent.until_printed("pid", 2)
    assert agent.drain(1) == (200, None)
    seen = agent.until("ready")
    assert (seen["drained"], seen["reason"], seen["generation"]) == (True, "Drained", 1)
    assert seen["worker"]["step"] == 7, "the last report stays readable"
    assert agent.end() == 0


def test_a_worker_that_ignores_the_event_is_killed_when_its_time_is_up(run_agent: RunAgent) -> None:
    agent = run_agent(POLL, script_args=("ignore",))
    agent.start(1)
    agent.until_printed("pid")
    asked_at = time.monotonic()
    agent.drain(1, timeout=1)
    seen = agent.until("ready")
    assert time.monotonic() - asked_at >= 1
    assert (seen["drained"], seen["reason"]) == (False, "DrainTimedOut")


def test_a_repeated_stop_gives_a_drain_less_time_and_never_more(run_agent: RunAgent) -> None:
    agent = run_agent(POLL, script_args=("ignore",))
    agent.start(1)
    agent.until_printed("pid")
    agent.drain(1, timeout=600)
    asked_at = time.monotonic()
    assert agent.drain(1, timeout=3)[0] == 200
    agent.drain(1, timeout=600)
    assert agent.until("ready")["reason"] == "DrainTimedOut"
    assert time.monotonic() - asked_at >= 3


def test_a_hard_stop_ends_a_drain(run_agent: RunAgent) -> None:
    agent = run_agent(POLL, script_args=("ignore",))
    agent.start(1)
    agent.until_printed("pid")
    agent.drain(1, timeout=600)
    agent.drain(1, timeout=600)
    assert agent.status()["status"] == "stopping"
    agent.stop(1)
    assert agent.until("ready")["drained"] is False


def test_a_drain_that_came_through_another_pod_is_no_completion(run_agent: RunAgent) -> None:
    """The event is agreed among all ranks: workers here may leave although this agent was not asked yet."""
    acknowledge = (
        "import os\nfrom elastipod.worker_file import WorkerFile\n"
        "WorkerFile.open(os.environ['ELASTIPOD_WORKER_FILE']).acknowledge(0)\n"
    )
    agent = run_agent(acknowledge)
    agent.start(1)
    until(lambda: agent.status()["drained"], "the drain")
    assert agent.status()["reason"] == "Drained"
    assert "STOPPING" in agent.status()["transitions"], "by the moves that the protocol knows"
    assert agent.drain(1) == (200, None), "its own stop then changes nothing"
    assert agent.status()["drained"] is True


def test_a_crash_during_a_drain_is_told(run_agent: RunAgent) -> None:
    crash = POLL + "sys.exit(3)\n"
    agent = run_agent(crash, "--nproc-per-node=2")
    agent.start(1)
    agent.until_printed("pid", 2)
    agent.drain(1)
    seen = agent.until("ready")
    assert (seen["drained"], seen["reason"], seen["failure"]["exitcode"]) == (False, "WorkerCrash", 3)


def test_all_descendants_of_workers_end_with_them(run_agent: RunAgent) -> None:
    agent = run_agent(FAMILY)
    agent.start(1)
    agent.until_printed("family")
    tree = until(lambda: len(found := _below(agent)) == 4 and found, "worker, children and orphan")
    agent.stop(1)
    agent.until("ready")
    assert not [process for process in tree if process.is_running()]
    assert not _below(agent), "no zombie either"


def _below(agent: AgentProcess) -> list[psutil.Process]:
    return psutil.Process(agent.process.pid).children(recursive=True)


def test_no_worker_outlives_an_agent_that_is_killed(run_agent: RunAgent) -> None:
    agent = run_agent(POLL)
    agent.start(1)
    agent.until_printed("pid")
    worker = psutil.Process(worker_pids(agent)[0])
    left_behind = Path(worker.environ()["ELASTIPOD_WORKER_FILE"]).parents[1]
    agent.process.kill()
    agent.process.wait()
    until_gone([worker])
    shutil.rmtree(left_behind, ignore_errors=True)


def test_the_wake_up_signal_kills_nobody_who_does_not_listen(run_agent: RunAgent) -> None:
    agent = run_agent("import time\nprint('awake', flush=True)\ntime.sleep(600)\n")
    agent.start(1)
    agent.until_printed("awake")
    agent.drain(1, timeout=0.3)
    assert agent.until("ready")["reason"] == "DrainTimedOut"
    assert "SIGUSR1" not in agent.printed()


DEAF = "import time\nprint('awake', flush=True)\ntime.sleep(600)\n"
HANDLES = (
    "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: None)\nprint('awake', flush=True)\n"
    + "time.sleep(1)\n" * 600
)
# Asks where Python allows no handler.
ASKS = """
import threading, time
from hyperpod_elastic_agent.elastic_event_handler import elastic_event_detected
asking = threading.Thread(target=elastic_event_detected)
asking.start()
asking.join()
print("awake", flush=True)
time.sleep(600)
"""


def test_workers_that_cannot_know_of_a_drain_are_told_of(run_agent: RunAgent) -> None:
    """Half a minute after their start, when their imports are over; a shell between agent and script changes nothing."""
    agents: list[AgentProcess] = []
    for script, *launcher in (
        (ASKS,),
        (HANDLES, "--no-python", "sh", "-c", f'{sys.executable} "$0"; true'),
        (DEAF,),
    ):
        agent = run_agent(script, *launcher)
        agent.start(1)
        agent.until_printed("awake")
        agent.drain(1, timeout=120)
        agents.append(agent)
    *others, deaf = agents
    until(lambda: deaf.status()["unanswered"], "the agent to find out", 50)
    assert [agent.status()["unanswered"] for agent in others] == [False, False]
    deaf.stop(1, is_graceful=False)
    seen = deaf.until("ready")
    assert (seen["drained"], seen["reason"], seen["unanswered"]) == (False, "EventUnanswered", False)
    assert "elastic_event_detected()" in seen["message"]


def test_generations_fence_late_and_repeated_calls(run_agent: RunAgent) -> None:
    check_fences(run_agent(POLL))


def test_the_plain_protocol_knows_no_generation(run_agent: RunAgent) -> None:
    check_plain_protocol(run_agent(POLL))


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "words"),
    [
        pytest.param("GET", "/nowhere", None, 404, "there is no /nowhere", id="unknown path"),
        pytest.param("GET", "/start", None, 405, "/start allows POST", id="wrong method"),
        pytest.param("POST", "/start", b"{", 422, "not JSON", id="broken JSON"),
        pytest.param("POST", "/start", b"[NaN]", 422, "not JSON", id="not a number"),
        pytest.param("POST", "/start", b"[]", 422, "must be a JSON object", id="a list"),
        pytest.param("POST", "/start", b'{"rank": 0}', 422, "nnodes", id="missing field"),
        pytest.param("POST", "/stop", b'{"timeout": "soon"}', 422, "timeout", id="wrong type"),
        pytest.param("GET", "/status?after=x", None, 422, "after", id="bad query"),
        pytest.param("POST", "/stop", b" " * (2**20 + 1), 413, "at most 1048576", id="large body"),
    ],
)
def test_bad_calls_are_answered_with_the_field_at_fault(
    run_agent: RunAgent, method: str, path: str, body: bytes | None, code: int, words: str
) -> None:
    agent = run_agent(SAY_RANK)
    answered, detail = agent.call(method, path, raw=body)
    assert answered == code
    assert words in str(detail["detail"])
    assert agent.status()["status"] == "ready"


def test_a_start_may_carry_the_addresses_of_thousands_of_pods(run_agent: RunAgent) -> None:
    agent = run_agent(SAY_RANK)
    addresses = [{"rank": rank, "ip": f"10.{rank >> 8}.0.{rank & 255}", "note": "x" * 200} for rank in range(16_000)]
    assert agent.start(1, rankIps=addresses)[0] == 200
    agent.until("completed")


def test_clients_that_stall_do_not_delay_supervision(run_agent: RunAgent) -> None:
    agent = run_agent(POLL)
    agent.start(1)
    agent.until_printed("pid")
    with ExitStack() as clients:
        for number in range(60):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", agent.port)))
            client.sendall(b"GET /sta" if number % 2 else b"POST /start HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n{")
        os.kill(worker_pids(agent)[0], signal.SIGKILL)
        agent.until("faulted")


def test_sigterm_is_told_at_once_and_training_goes_on_until_the_drain(run_agent: RunAgent) -> None:
    agent = run_agent(POLL)
    agent.start(1)
    agent.until_printed("pid")
    agent.process.terminate()
    until(lambda: agent.status()["terminating"], "terminating")
    assert agent.status()["status"] == "running"
    agent.drain(1)
    assert agent.until("ready")["drained"] is True
    assert agent.call("POST", "/shutdown")[0] == 200
    assert agent.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("script", "state", "code"),
    [
        pytest.param(None, "ready", 143, id="before any run"),
        pytest.param(SAY_RANK, "completed", 0, id="after completion"),
        pytest.param("raise SystemExit(9)", "faulted", 1, id="after a fault"),
    ],
)
def test_sigterm_ends_an_idle_agent_quickly(run_agent: RunAgent, script: str | None, state: str, code: int) -> None:
    agent = run_agent(script or SAY_RANK)
    if script:
        agent.start(1)
    agent.until(state)
    agent.process.terminate()
    assert agent.process.wait(PATIENCE_S) == code


def test_shutdown_ends_workers_and_process(run_agent: RunAgent) -> None:
    agent = run_agent(POLL, "--nproc-per-node=2")
    agent.start(1)
    agent.until_printed("pid", 2)
    pids = worker_pids(agent)
    assert agent.call("POST", "/shutdown") == (200, None)
    assert agent.process.wait(PATIENCE_S) == 0
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_gentle_stop_sends_the_chosen_signal_first(run_agent: RunAgent) -> None:
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0)))\n"
        "print('awake', flush=True)\ntime.sleep(600)\n"
    )
    agent = run_agent(script, "--shutdown-signal=SIGTERM")
    agent.start(1)
    agent.until_printed("awake")
    agent.stop(1)
    assert agent.until("ready")["drained"] is False
    agent.until_printed("bye")


def test_a_shell_may_be_the_parent_and_an_orphan_is_collected(run_agent: RunAgent) -> None:
    """A container's command is often a shell line: the agent collects what it adopts, PID 1 or not."""
    agent = run_agent(FAMILY, wrapper=("/bin/sh", "-c", '"$@"; code=$?; exit $code', "sh"))
    agent.start(1)
    agent.until_printed("family")
    assert agent.call("POST", "/shutdown")[0] == 200
    assert agent.process.wait(PATIENCE_S) == 0


def test_pre_and_post_scripts_see_the_size_of_every_start(run_agent: RunAgent, tmp_path: Path) -> None:
    (tmp_path / "pre.sh").write_text('echo "before $1 with $NNODES"\n', "utf-8")
    (tmp_path / "post.sh").write_text('echo "after $1 with $NNODES"\n', "utf-8")
    agent = run_agent(
        SAY_RANK,
        f"--pre-train-script={tmp_path / 'pre.sh'}",
        "--pre_train_args='the run'",
        f"--post-train-script={tmp_path / 'post.sh'}",
        "--post-train-args=it",
    )
    agent.start(1, nnodes=3)
    agent.until("completed")
    printed = agent.printed()
    assert printed.index("before the run with 3") < printed.index("rank 0 of 3") < printed.index("after it with 3")


def test_a_failing_pre_script_is_a_fault_with_its_words(run_agent: RunAgent, tmp_path: Path) -> None:
    (tmp_path / "pre.sh").write_text("echo no data at /data >&2\nexit 4\n", "utf-8")
    agent = run_agent(SAY_RANK, "--pre-train-script", str(tmp_path / "pre.sh"))
    agent.start(1)
    seen = agent.until("faulted")
    assert seen["reason"] == "PreScriptFailed"
    assert "exit code 4" in seen["message"]
    assert "no data at /data" in seen["message"]


def test_a_stop_during_a_long_pre_script_ends_it(run_agent: RunAgent, tmp_path: Path) -> None:
    (tmp_path / "pre.sh").write_text("echo waiting\nsleep 600\n", "utf-8")
    agent = run_agent(SAY_RANK, "--pre-train-script", str(tmp_path / "pre.sh"))
    agent.start(1)
    agent.until_printed("waiting")
    agent.stop(1)
    agent.until("ready")
    assert not _below(agent)


def test_what_keeps_workers_from_starting_is_told(run_agent: RunAgent, tmp_path: Path) -> None:
    agent = run_agent(SAY_RANK)
    (tmp_path / "train.py").unlink()
    agent.start(1)
    seen = agent.until("faulted")
    assert (seen["reason"], seen["message"]) == (
        "StartFailed",
        f"training script {tmp_path / 'train.py'} does not exist",
    )


def test_a_taken_master_port_is_told_as_such(run_agent: RunAgent) -> None:
    agent = run_agent(SAY_RANK)
    with socket.create_server(("127.0.0.1", 0)) as other:
        agent.start(1, master_port=other.getsockname()[1])
        seen = agent.until("faulted")
    assert seen["reason"] == "WorkerFault"
    assert seen["message"].startswith("EADDRINUSE")


def test_tee_redirects_and_filters_mean_what_they_mean_in_torchrun(run_agent: RunAgent, tmp_path: Path) -> None:
    script = "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', os.environ['RANK'], file=sys.stderr)\n"
    logs = tmp_path / "logs"
    agent = run_agent(
        script, "--nproc-per-node=2", f"--log_dir={logs}", "--tee", "1", "--redirect", "2", "--rdzv-id=r1"
    )
    agent.start(1)
    agent.until("completed")
    agent.until_printed("[default1]:out 1")
    assert "err 1" not in agent.printed()
    (own,) = logs.glob("r1_*")
    assert (own / "attempt_0/1/stdout.log").read_text("utf-8") == "out 1\n"
    assert (own / "attempt_0/0/stderr.log").read_text("utf-8") == "err 0\n"


def test_a_storm_of_signals_and_calls_ends_in_a_legal_state(run_agent: RunAgent, seed: int) -> None:
    agent = run_agent(POLL, "--nproc-per-node=2")
    process = psutil.Process(agent.process.pid)
    dice = random.Random(seed)
    agent.start(1)
    agent.stop(1)
    agent.until("ready")
    descriptors = process.num_fds()
    for generation in range(2, 22):
        assert agent.start(generation)[0] == 200
        for _ in range(dice.randrange(5)):
            _throw(dice, agent, process, generation)
        if agent.status()["status"] != "ready":
            agent.stop(generation)
        agent.until("ready")
        assert not process.children(recursive=True)
    until(lambda: process.num_fds() <= descriptors, "the descriptors of ended workers to be closed")
    assert "Traceback" not in agent.printed()


def _throw(dice: random.Random, agent: AgentProcess, process: psutil.Process, generation: int) -> None:
    """Do one thing to an agent or its workers, whatever they are doing (a worker may be just about to exec)."""
    child = dice.choice([None, *process.children()])
    act = dice.choice(["kill", "terminate", "suspend", "stop", "drain", "again", "older", "status"])
    if act in ("kill", "terminate", "suspend"):
        if child is not None:
            with suppress(psutil.NoSuchProcess):
                getattr(child, act)()
    elif act == "stop":
        agent.stop(generation)
    elif act == "drain":
        agent.drain(generation, timeout=dice.choice([0, 0.05, 0.5]))
    elif act == "again":
        assert agent.start(generation)[0] == 200
    elif act == "older":
        assert agent.start(generation - 1)[0] == 409
    else:
        assert agent.status()["generation"] == generation


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        pytest.param(["--nproc-per-node=many", "t.py"], 2, "--nproc-per-node is 'many'", id="worker count"),
        pytest.param(["--shutdown-signal=SIGFOO", "t.py"], 2, "invalid choice", id="choice"),
        pytest.param(["--nnodes=2:x", "t.py"], 2, "--nnodes is '2:x'", id="nnodes"),
        pytest.param([], 2, "training_script", id="no script"),
        pytest.param(["--log-dir=/proc/nowhere", "t.py"], 2, "--log-dir /proc/nowhere", id="log directory"),
    ],
)
def test_a_bad_command_line_ends_with_one_sentence(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    done = _run_to_end(tmp_path, arguments)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_ends_with_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = _run_to_end(tmp_path, ["--server-host=127.0.0.1", f"--server-port={port}", "t.py"])
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_idle_agent_is_light_and_free_of_torch(run_agent: RunAgent) -> None:
    agent = run_agent(SAY_RANK)
    process = psutil.Process(agent.process.pid)
    assert process.memory_full_info().uss < 60 * 2**20
    assert not [m.path for m in process.memory_maps() if "torch" in m.path]


def test_outside_a_pod_it_is_torchrun(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(SAY_RANK + "print(sys.argv[1:])\n".replace("sys", "__import__('sys')"), "utf-8")
    done = _run_to_end(
        tmp_path,
        ["--nproc_per_node=1", "--rdzv-backend=hyperpod", "--server-port=1", "t.py", "--server-port", "2"],
        is_pod=False,
    )
    assert "rank 0 of 1" in done.stdout
    assert "['--server-port', '2']" in done.stdout
    assert done.returncode == 0


def _run_to_end(folder: Path, arguments: list[str], *, is_pod: bool = True) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(PACKAGES)}
    if is_pod:
        env["KUBERNETES_SERVICE_HOST"] = "127.0.0.1"
    command = [sys.executable, "-m", "elastipod_agent", *arguments]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
