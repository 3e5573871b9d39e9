"""`elastipod watch` and `elastipod completion`."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.unit.client.fake_kubectl import FakeKubectl

from elastipod import cli
from elastipod_client.completion import SHELLS, complete
from elastipod_client.kubectl import Kubectl, KubectlError, NotFoundError
from elastipod_client.situation import Situation
from elastipod_client.watch import follow

JOBS = "hyperpodpytorchjobs.sagemaker.amazonaws.com"


def job(state: str) -> dict[str, Any]:
    condition = {"type": state, "status": "True", "reason": state, "message": "a sentence"}
    meta = {"name": "llm", "namespace": "team", "uid": "u", "annotations": {"elastipod.io/size": "2/2/4"}}
    return {"metadata": meta, "status": {"conditions": [condition]}}


def pod(name: str, phase: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "ownerReferences": [{"uid": "u"}]}, "spec": {}, "status": {"phase": phase}}


def answers(state: str) -> dict[str, object]:
    pods = [pod("llm-a-1", "Running"), pod("llm-a-0", "Pending")]
    return {f"get {JOBS} llm": job(state), "get pods": {"items": pods}, "get events": {"items": []}}


@pytest.mark.parametrize(("state", "status"), [("Completed", 0), ("Failed", 1)])
def test_watching_ends_with_the_job(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], state: str, status: int
) -> None:
    kubectl.answer(answers("Running"))
    waits: list[float] = []

    def wait(seconds: float) -> None:
        """The job goes on while the command waits: the first time nothing changes, the second time it ends."""
        waits.append(seconds)
        if len(waits) == 2:
            kubectl.answer(answers(state))

    assert follow(Kubectl(), "llm", 5.0, is_once=False, sleep=wait) == status
    out = capsys.readouterr().out
    assert waits == [5.0, 5.0]
    assert out.count("team/llm   Running   running 2, target 2, maximum 4") == 1, "what has not changed is not repeated"
    assert out.count(f"team/llm   {state}") == 1


def test_what_only_grows_older_is_not_printed_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of the command would have all of it for every second that a pod is older."""
    began = datetime(2026, 1, 1, tzinfo=UTC)
    pods = [pod("llm-a-0", "Running")]
    pods[0]["metadata"]["creationTimestamp"] = began.isoformat()
    ages = [timedelta(seconds=10), timedelta(seconds=12), timedelta(minutes=50)]
    coming = [Situation(now=began + age, job=job("Running"), pods=pods) for age in ages]
    coming.append(replace(coming[-1], job=job("Completed")))
    monkeypatch.setattr("elastipod_client.watch.observe", lambda *_: coming.pop(0))
    assert follow(Kubectl(), "llm", 1.0, is_once=False, sleep=lambda _: None) == 0
    assert capsys.readouterr().out.count("llm-a-0") == 2


def test_lines_of_a_live_picture_are_cut_to_the_terminal(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answers("Completed")
    found["get pods"] = {"items": [pod("llm-with-a-long-name-" * 5 + "0", "Running")]}
    kubectl.answer(found)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("elastipod_client.watch.get_terminal_size", lambda: os.terminal_size((40, 20)))
    assert follow(Kubectl(), "llm", 5.0, is_once=False) == 0
    lines = re.sub(r"\x1b\[[0-9]*[A-Z]", "", capsys.readouterr().out).splitlines()
    assert any(line.startswith("llm-with-a-long-name-") for line in lines)
    assert max(map(len, lines)) == 40


GONE = f'Error from server (NotFound): {JOBS} "llm" not found'
REFUSED = "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host or port?"
FAILURES = {
    "error: " + REFUSED: REFUSED,
    f'error: the server doesn\'t have a resource type "{JOBS}"': f'the server doesn\'t have a resource type "{JOBS}"',
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_poll_that_fails_is_said_and_watching_goes_on(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], failure: str
) -> None:
    kubectl.answer(answers("Running"))
    coming: list[dict[str, object]] = [{f"get {JOBS} llm": failure}, {f"get {JOBS} llm": failure}, answers("Completed")]
    assert follow(Kubectl(), "llm", 5.0, is_once=False, sleep=lambda _: kubectl.answer(coming.pop(0))) == 0
    out = capsys.readouterr().out
    assert out.count(f"the job could not be read: {FAILURES[failure]}") == 1
    assert out.index("team/llm   Running") < out.index("could not be read") < out.index("team/llm   Completed")


def test_watching_gives_up_when_nothing_could_be_read_for_minutes(kubectl: FakeKubectl) -> None:
    kubectl.answer(answers("Running"))
    now = 0.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds
        kubectl.answer({f"get {JOBS} llm": f"error: {REFUSED}"})

    with pytest.raises(KubectlError, match=r"^the job could not be read for 5 min: The connection to the server"):
        follow(Kubectl(), "llm", 100.0, is_once=False, sleep=wait, clock=lambda: now)
    assert now == 400.0, "5 min after the first poll that failed"


def test_a_first_poll_that_fails_ends_the_command(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer({f"get {JOBS} llm": f"error: {REFUSED}"})
    assert cli.main(["watch", "llm"]) == 3
    assert capsys.readouterr().err == f"elastipod watch: {REFUSED}\n"
    kubectl.answer({f"get {JOBS} llm": GONE})
    assert cli.main(["watch", "llm"]) == 3
    assert capsys.readouterr().err == f'elastipod watch: (NotFound): {JOBS} "llm" not found\n'


def test_a_job_that_is_deleted_while_it_is_watched_is_shown_as_it_was_last_seen(kubectl: FakeKubectl) -> None:
    kubectl.answer(answers("Running"))
    with pytest.raises(NotFoundError) as raised:
        follow(Kubectl(), "llm", 5.0, is_once=False, sleep=lambda _: kubectl.answer({f"get {JOBS} llm": GONE}))
    said = r"job llm was deleted; at \d\d:\d\d:\d\d UTC it was last seen: team/llm   Running   running 2, target 2, maximum 4"
    assert re.fullmatch(said, str(raised.value))


def test_one_look(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer(answers("Running"))
    assert cli.main(["watch", "llm", "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["POD", "llm-a-0", "llm-a-1"]
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("interval", ["0", "often", "99999"])
def test_an_interval_that_is_none(capsys: pytest.CaptureFixture[str], interval: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["watch", "llm", "--interval", interval])
    assert "it must be a number of seconds from 1 to 3600" in capsys.readouterr().err


MODULES = {name: command.module for name, command in cli.COMMANDS.items()}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        pytest.param(["wh"], ["why"], id="a command"),
        pytest.param(["why", ""], ["llm", "lm-2"], id="jobs"),
        pytest.param(["why", "ll"], ["llm"], id="jobs that begin so"),
        pytest.param(["why", "llm", "-o", ""], ["json", "text", "wide", "yaml"], id="values of an option"),
        pytest.param(["logs", "llm", "--f"], ["--first-failure", "--follow"], id="options"),
        pytest.param(["logs", "--follow", "l"], ["llm", "lm-2"], id="behind an option without a value"),
        pytest.param(["doctor", ""], [], id="a command without a job"),
        pytest.param(["audit", ""], [], id="a command of another part"),
        pytest.param(["nothing", ""], [], id="no command"),
        pytest.param(["why", "llm", "--output=j"], ["--output=json"], id="a value behind ="),
        pytest.param(["why", "llm", "--output", "=", "j"], ["json"], id="a value behind =, as bash splits it"),
        pytest.param(["why", "llm", "--output", "="], ["json", "text", "wide", "yaml"], id="nothing behind =, in bash"),
    ],
)
def test_candidates(words: list[str], found: list[str]) -> None:
    assert complete(words, MODULES, lambda _: ["llm", "lm-2"]) == found


def test_jobs_are_those_of_the_namespace_that_the_words_name() -> None:
    asked: list[Kubectl] = []

    def jobs(kubectl: Kubectl) -> list[str]:
        asked.append(kubectl)
        return []

    complete(["why", "-n", "team", "--context=c", ""], MODULES, jobs)
    assert asked == [Kubectl(namespace="team", context="c")]


def test_bash_splits_options_at_their_equals_sign() -> None:
    asked: list[Kubectl] = []
    complete(["why", "--namespace", "=", "team", ""], MODULES, lambda kubectl: asked.append(kubectl) or ["llm"])  # type: ignore[func-returns-value]
    assert asked == [Kubectl(namespace="team")]


def test_kubectl_gets_its_directive(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    from elastipod_client.completion import main_for_kubectl

    kubectl.answer({f"get {JOBS} -o name": "hyperpodpytorchjob.sagemaker.amazonaws.com/llm"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["kubectl_complete-elastipod", "why", ""])
        assert main_for_kubectl() == 0
    assert capsys.readouterr().out == "llm\n:4\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert cli.main(["completion", shell]) == 0
    assert "elastipod completion candidates -- " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "at", "found"),
    [("elastipod wh", 1, "why"), ("elastipod why --output =", 3, "why watch"), ("elastipod why -o = wh", 4, "why")],
)
def test_bash_completes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, at: int, found: str) -> None:
    """The script, with a stand-in for the command that prints two candidates."""
    program = tmp_path / "elastipod"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "why" "watch"\n')
    program.chmod(0o755)
    script = SHELLS["bash"] + '\nCOMP_WORDS=(WORDS); COMP_CWORD=AT; _elastipod; echo "${COMPREPLY[@]}"'
    script = script.replace("WORDS=(WORDS)", f"WORDS=({words})").replace("CWORD=AT", f"CWORD={at}")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{found}\n"
