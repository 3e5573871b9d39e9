"""`elastipod logs --first-failure`: what the first failing worker printed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.client.fake_kubectl import FakeKubectl
from tests.unit.core.builders import agent, replicas_of, running, trains
from tests.unit.core.builders import pod as pod_of

from elastipod import cli
from elastipod_client.failure_log import excerpt
from elastipod_operator.core.faults import find_fault
from elastipod_operator.core.snapshot import AgentState, Failure

JOBS = "hyperpodpytorchjobs.sagemaker.amazonaws.com"


def told_of_rank(rank: int, words: str = "KeyError: 'x'") -> str:
    """Give what the operator says when a global rank, of the second pod of a job, failed first."""
    agents = agent(AgentState.FAULTED, 1, reason="WorkerCrash", failure=Failure(rank, 1, "", words))
    fault = find_fault(trains(), replicas_of(trains(), (pod_of(0), running()), (pod_of(1), agents)))
    assert fault is not None
    return fault.message


def job(state: str = "Running", status: dict[str, Any] | None = None, message: str = "", **spec: Any) -> dict[str, Any]:
    condition = {"type": state, "status": "True", "reason": state, "message": message or told_of_rank(3)}
    meta = {"name": "llm", "namespace": "team"}
    return {"metadata": meta, "spec": spec, "status": {"conditions": [condition], **(status or {})}}


LOG = """\
starting
[default0]:step 1
[default1]:Traceback (most recent call last):
[default1]:  File "old.py", line 1, in <module>
[default1]:OSError: an earlier failure
starting again
[default0]:Traceback (most recent call last):
[default1]:Traceback (most recent call last):
[default0]:  File "train.py", line 3, in <module>
[default1]:  File "train.py", line 7, in <module>
[default0]:RuntimeError: a peer is gone
[default1]:KeyError: 'x'"""


@pytest.mark.parametrize(("rank", "last"), [(0, "RuntimeError: a peer is gone"), (1, "KeyError: 'x'")])
def test_the_newest_traceback_of_the_rank_is_shown(rank: int, last: str) -> None:
    shown = excerpt(LOG, rank)
    assert len(shown) == 3
    assert shown[0].endswith("Traceback (most recent call last):")
    assert shown[-1].endswith(last)


def test_a_progress_bar_is_one_line() -> None:
    log = "[default0]: 10%\r[default0]: 20%\r\n[default0]:Traceback (most recent call last):\n[default0]:KeyError: 'a\x85b'\n"
    assert excerpt(log, 0) == ["[default0]:Traceback (most recent call last):", "[default0]:KeyError: 'a\x85b'"]
    assert len(excerpt(log.partition("[default0]:Trace")[0])) == 1


def test_without_a_traceback_the_end_is_shown() -> None:
    assert excerpt("\n".join(f"line {n}" for n in range(100)))[-1] == "line 99"
    assert len(excerpt("\n".join(f"line {n}" for n in range(100)))) == 40


FAULTY = {"latestFaultyPodInstanceList": {"faultyPodList": ["llm-a-1"], "faultyRankList": ["1"]}}


def pod(name: str, restarts: int = 0) -> dict[str, Any]:
    status = {"name": "train", "restartCount": restarts}
    return {
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "train"}]},
        "status": {"containerStatuses": [status]},
    }


HEALTHY = "\n".join(f"[default1]:step {n}" for n in range(100))


@pytest.mark.parametrize(
    ("restarts", "now", "before", "shown"),
    [
        pytest.param(0, LOG, "", LOG, id="no restart"),
        pytest.param(2, LOG, LOG.replace("'x'", "'y'"), LOG, id="a failure since the restart"),
        pytest.param(2, HEALTHY, LOG, LOG, id="the failure that led to the restart"),
        pytest.param(2, HEALTHY, "error: it is gone", HEALTHY, id="its log is gone"),
    ],
)
def test_the_log_is_that_of_the_run_with_the_newest_failure(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], restarts: int, now: str, before: str, shown: str
) -> None:
    pods = {"items": [pod("llm-a-1", restarts)]}
    logs = "logs llm-a-1 -c train --tail=5000"
    kubectl.answer(
        {
            f"get {JOBS} llm": job("Failed", FAULTY, nprocPerNode="2"),
            "get pods": pods,
            logs: now,
            f"{logs} --previous": before,
        }
    )
    assert cli.main(["logs", "llm", "--first-failure"]) == 1
    out = capsys.readouterr().out
    assert out.endswith(f"{shown.splitlines()[-1]}\n")
    assert ("(no traceback in the last 5000 lines of its log, which may begin after the failure" in out) is (
        shown is HEALTHY
    )


def test_the_first_failure_is_that_of_the_faulty_pod(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    found = job("Failed", FAULTY, nprocPerNode="2")
    pods = {"items": [pod("llm-a-0"), pod("llm-a-1")]}
    kubectl.answer({f"get {JOBS} llm": found, "get pods": pods, "logs llm-a-1 -c train": LOG})
    assert cli.main(["logs", "llm", "--first-failure"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{told_of_rank(3)}\n\npod llm-a-1:\n")
    assert out.endswith("[default1]:KeyError: 'x'\n")


def test_the_log_is_that_of_the_container_that_the_pod_was_made_with(kubectl: FakeKubectl) -> None:
    """The job may name another one by now."""
    one = pod("llm-a-1")
    env = [{"name": f"ELASTIPOD_{name}", "value": "x"} for name in ("JOB", "RUN_ID", "POD", "AGENT_PORT")]
    one["spec"]["containers"] = [{"name": "side"}, {"name": "train", "env": env}]
    found = job("Failed", FAULTY, elastipod={"container": "side"})
    kubectl.answer({f"get {JOBS} llm": found, "get pods": {"items": [one]}, "logs llm-a-1 -c train": LOG})
    assert cli.main(["logs", "llm", "--first-failure"]) == 1


def test_a_log_with_bytes_that_are_not_utf_8_is_shown(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    found = {f"get {JOBS} llm": job("Failed", FAULTY, nprocPerNode="2"), "get pods": {"items": [pod("llm-a-1")]}}
    kubectl.answer({**found, "logs llm-a-1 -c train": f"caf\udce9\n{LOG}: b'\udcff'"})
    assert cli.main(["logs", "llm", "--first-failure"]) == 1
    assert capsys.readouterr().out.endswith("[default1]:KeyError: 'x': b'\N{REPLACEMENT CHARACTER}'\n")


def test_a_pod_that_is_gone(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer({f"get {JOBS} llm": job("Failed", FAULTY), "get pods": {"items": [pod("llm-a-0")]}})
    assert cli.main(["logs", "llm", "--first-failure"]) == 1
    assert "pod llm-a-1 is gone, and its log with it; your log collection may have it" in capsys.readouterr().out


def test_a_job_without_a_fault(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer({f"get {JOBS} llm": job(), "get pods": {"items": [pod("llm-a-0")]}})
    assert cli.main(["logs", "llm", "--first-failure"]) == 0
    assert capsys.readouterr().out == "job llm has had no fault\n"


def test_the_rank_is_the_global_one_that_the_operator_names(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the group rank in front, 1, and the script's own words behind, which may name any rank."""
    message = told_of_rank(10, "RuntimeError: rank 7 said goodbye")
    assert message.startswith("group rank 1 (pod ")
    found = {f"get {JOBS} llm": job("Failed", FAULTY, message, nprocPerNode="2")}
    kubectl.answer({**found, "get pods": {"items": [pod("llm-a-1")]}, "logs llm-a-1 -c train": LOG})
    assert cli.main(["logs", "llm", "--first-failure"]) == 1
    assert capsys.readouterr().out.endswith("[default0]:RuntimeError: a peer is gone\n"), (
        "global rank 10 is local rank 0"
    )


ONE_AFTER_THE_OTHER = """\
[default1]:Traceback (most recent call last):
[default1]:OSError: in an earlier generation
[default3]:Traceback (most recent call last):
[default3]:  File "train.py", line 7, in <module>
[default3]:KeyError: 'x'
[default0]:Traceback (most recent call last):
[default0]:RuntimeError: a peer is gone
[default1]:Traceback (most recent call last):
[default1]:RuntimeError: a peer is gone"""


@pytest.mark.parametrize("rank", [None, 7])
def test_of_an_unknown_rank_the_earliest_traceback_of_the_newest_failure_is_shown(rank: int | None) -> None:
    assert excerpt(ONE_AFTER_THE_OTHER, rank)[-1] == "[default3]:KeyError: 'x'"


STARTING = "hyperpodrun: 2026-01-01T00:00:00.000Z INFO starting workers job=team/llm generation=2 nnodes=1 nproc=2"
CHAINED = f"""\
[default1]:Traceback (most recent call last):
[default1]:OSError: in an earlier generation
{STARTING}
[default0]:Traceback (most recent call last):
[default0]:KeyError: 'x'
[default1]:step 3
[default0]:
[default0]:WORDS
[default0]:
[default0]:Traceback (most recent call last):
[default0]:RuntimeError: the batch cannot be read"""


@pytest.mark.parametrize("rank", [0, None])
@pytest.mark.parametrize(
    "words",
    [
        "The above exception was the direct cause of the following exception:",
        "During handling of the above exception, another exception occurred:",
    ],
)
def test_chained_exceptions_are_shown_from_their_cause_on(rank: int | None, words: str) -> None:
    shown = excerpt(CHAINED.replace("WORDS", words), rank)
    assert shown[1] == "[default0]:KeyError: 'x'"
    assert shown[-1] == "[default0]:RuntimeError: the batch cannot be read"


def test_of_a_generation_the_tracebacks_that_ended_ranks_count() -> None:
    """A script may log an exception and go on."""
    caught = "[default0]:Traceback (most recent call last):\n[default0]:OSError: tried again\n[default0]:step 1\n"
    log = f"{STARTING}\n{caught}{caught}{ONE_AFTER_THE_OTHER.partition('generation')[2].strip()}"
    assert excerpt(log)[-1] == "[default3]:KeyError: 'x'"
    assert excerpt(log, 0)[-1] == "[default0]:RuntimeError: a peer is gone"


def test_the_workers_of_a_pod_are_counted_by_its_agent_if_the_job_does_not_say(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {f"get {JOBS} llm": job("Failed", FAULTY, nprocPerNode="auto"), "get pods": {"items": [pod("llm-a-1")]}}
    log = LOG.replace("starting again", STARTING)
    kubectl.answer({**found, "logs llm-a-1 -c train": log})
    assert cli.main(["logs", "llm", "--first-failure"]) == 1
    assert capsys.readouterr().out.endswith("[default1]:KeyError: 'x'\n"), "global rank 3 is local rank 1 of 2"


def test_the_parts_of_an_exception_group_are_shown_with_it() -> None:
    log = """\
  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 3, in <module>
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    | ValueError: one"""
    assert excerpt(log) == log.splitlines()


def test_a_message_does_not_reach_the_terminal_with_its_control_characters(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    found = job("Failed", FAULTY, told_of_rank(3, "\x1b]0;mine\x07"))
    kubectl.answer({f"get {JOBS} llm": found, "get pods": {"items": [pod("llm-a-1")]}, "logs llm-a-1": "\x1b[2Jhello"})
    assert cli.main(["logs", "llm", "--first-failure"]) == 1
    out = capsys.readouterr().out
    assert "hello" in out
    assert not {"\x1b", "\x07"} & set(out)
