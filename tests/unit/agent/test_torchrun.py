"""Outside of a pod `hyperpodrun` becomes torchrun: when, with which arguments, and what it says without torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastipod_agent import main as main_module
from elastipod_agent import torchrun
from elastipod_agent.main import main


class Replaced(BaseException):
    """Raised where this process would go on as another program."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What this process was replaced by: the program and its arguments. A torch whose launcher has no --shutdown-timeout is there."""
    found: list[Any] = []

    def replace(program: str, arguments: list[str]) -> None:
        found.append([program, arguments])
        raise Replaced

    monkeypatch.setattr(os, "execv", replace)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    has_torch(monkeypatch, tmp_path, "")
    return found


def has_torch(monkeypatch: pytest.MonkeyPatch, root: Path, launcher: str) -> None:
    (root / "torch" / "distributed").mkdir(parents=True, exist_ok=True)
    (root / "torch" / "distributed" / "run.py").write_text(launcher)
    where = {"torch": SimpleNamespace(origin=str(root / "torch" / "__init__.py"))}
    monkeypatch.setattr(importlib.util, "find_spec", where.get)


OURS = ["--server-port=1", "--shutdown-timeout=9", "--nnodes=2", "-m", "train", "--lr=1"]


@pytest.mark.parametrize(
    ("arguments", "in_pod", "becomes"),
    [
        (OURS, False, ["--nnodes=2", "--module", "train", "--lr=1"]),
        (["--standalone", "t.py"], True, ["--standalone", "t.py"]),
        (["--standalone", "t.py"], False, ["--standalone", "t.py"]),
        (["--print-completion=bash"], True, ["--print-completion=bash"]),
        (["--print_completion", "zsh"], False, ["--print_completion", "zsh"]),
    ],
)
def test_it_becomes_torchrun_without_the_options_of_the_agent(
    monkeypatch: pytest.MonkeyPatch, launched: list[Any], arguments: list[str], in_pod: bool, becomes: list[str]
) -> None:
    if in_pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(Replaced):
        main(arguments)
    assert launched == [[sys.executable, [sys.executable, "-m", "torch.distributed.run", *becomes]]]


def test_in_a_pod_it_is_the_agent(monkeypatch: pytest.MonkeyPatch, launched: list[Any]) -> None:
    ran: list[Any] = []

    def run_agent(settings: Any, *_: Any) -> int:
        ran.append(settings)
        return 7

    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(main_module, "run_agent", run_agent)
    assert main(["--server-port=1234", "t.py"]) == 7
    assert ([each.port for each in ran], launched) == ([1234], [])


def test_a_torchrun_that_knows_the_time_to_stop_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launched: list[Any]
) -> None:
    has_torch(monkeypatch, tmp_path, 'parser.add_argument("--shutdown-timeout")')
    with pytest.raises(Replaced):
        main(OURS)
    assert launched[0][1][3:] == ["--shutdown-timeout=9", "--nnodes=2", "--module", "train", "--lr=1"]


@pytest.mark.parametrize("spec", [None, SimpleNamespace(origin=None)], ids=["no torch", "a folder of that name"])
@pytest.mark.parametrize("arguments", [["t.py"], ["--print-completion=bash"]], ids=["a script", "completion"])
def test_without_torch_it_ends_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    launched: list[Any],
    capsys: pytest.CaptureFixture[str],
    spec: Any,
    arguments: list[str],
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", {"torch": spec}.get)
    assert main(arguments) == 1
    said = f"torch is not installed for {sys.executable}; install it, or use an image that has it"
    assert capsys.readouterr().err == f"hyperpodrun: error: {said}\n"
    assert launched == []


def test_what_was_said_before_is_not_lost(monkeypatch: pytest.MonkeyPatch, launched: list[Any]) -> None:
    """The program that takes this process over knows nothing of what Python still holds back."""
    flushed: list[str] = []
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, SimpleNamespace(flush=lambda name=name: flushed.append(name)))
    with pytest.raises(Replaced):
        main(["t.py"])
    assert flushed == ["stdout", "stderr"]


def ended(text: str) -> Callable[..., Any]:
    return lambda *given, **more: SimpleNamespace(stdout=text)


def raising(error: Exception) -> Callable[..., Any]:
    def run(*_: Any, **__: Any) -> Any:
        raise error

    return run


def test_newer_options_of_torch_are_taken_and_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(command: list[str], **more: Any) -> Any:
        asked.append((command, more))
        listed = '[[["--brand_new", "--brand-new", "-b"], false], [["--flag"], true], [["--nnodes"], false], [["-h", "--help"], true]]'
        return SimpleNamespace(stdout=f"a warning\n{listed}\n")

    monkeypatch.setattr(subprocess, "run", run)
    new, flag = torchrun.installed_options()
    assert (new.names, new.kind, flag.names, flag.kind) == (("--brand-new", "-b"), str, ("--flag",), None)
    assert new.unused == flag.unused == "it is newer than this agent, which does not know it"
    ((command, more),) = asked
    assert (command[:2], "get_args_parser" in command[2]) == ([sys.executable, "-c"], True)
    assert more == {"capture_output": True, "text": True, "timeout": 120, "check": True}


@pytest.mark.parametrize(
    "run",
    [
        raising(OSError()),
        raising(subprocess.CalledProcessError(1, "python")),
        raising(subprocess.TimeoutExpired("python", 1)),
        ended(""),
        ended("no JSON"),
    ],
    ids=["no interpreter", "no torch", "too slow", "nothing said", "nonsense"],
)
def test_a_torch_that_does_not_tell_its_options_has_none(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.setattr(subprocess, "run", run)
    assert torchrun.installed_options() == []
