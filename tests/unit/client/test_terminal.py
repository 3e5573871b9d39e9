"""Messages of pods and scripts do not move the cursor of those who read them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from tests.nonempty import some
from tests.unit.client.fake_kubectl import FakeKubectl

import elastipod_client
from elastipod import cli
from elastipod_client.options import as_json, table
from elastipod_client.terminal import one_line, printable

JOBS = "hyperpodpytorchjobs.sagemaker.amazonaws.com"
# The title of a window, a cleared screen, the one-byte form of the same, and text that is read from right to left.
HOSTILE = "\x1b]0;mine\x07 \x1b[2J \x9b2J \u202egnp.exe\r"


def test_what_cannot_be_seen_is_replaced() -> None:
    assert printable("a\x1b[31mb\x00\x9b\u202e") == "a\ufffd[31mb\ufffd\ufffd\ufffd"
    assert printable("line 1\n\tline 2: → “x” é\u00a0") == "line 1\n\tline 2: → “x” é\u00a0"
    assert one_line("a\n\tb") == "a b"
    assert table([("a\nb", "c"), ("d", "e\x1b")]) == "a b   c\nd     e\ufffd"


def test_json_keeps_them_as_escapes() -> None:
    assert as_json({"a": "\x1b\x9b é"}) == '{\n  "a": "\\u001b\\u009b é"\n}'


def job() -> dict[str, Any]:
    state = {"type": "Suspended", "status": "True", "reason": "InvalidSpec", "message": HOSTILE}
    annotations = {"elastipod.io/size": "2/2/4"}
    meta = {"name": "llm", "namespace": "team", "uid": "u", "annotations": annotations}
    return {"metadata": meta, "status": {"conditions": [state]}}


@pytest.mark.parametrize(
    "command",
    [
        ["why", "llm"],
        ["why", "llm", "-o", "wide"],
        ["why", "llm", "-o", "json"],
        ["watch", "llm", "--once"],
        ["doctor"],
    ],
    ids=" ".join,
)
def test_no_command_prints_them(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    waiting = {"name": "train", "state": {"waiting": {"reason": HOSTILE}}}
    pod = {"metadata": {"name": "a", "ownerReferences": [{"uid": "u"}]}, "status": {"containerStatuses": [waiting]}}
    kubectl.answer(
        {
            f"get {JOBS} llm": job(),
            f"get {JOBS}": {"items": [job()]},
            "get pods": {"items": [pod]},
            "get events": {"items": []},
            "version": {"serverVersion": {"gitVersion": HOSTILE}},
            "get": f"Error from server (Forbidden): {HOSTILE}",
        }
    )
    cli.main(command)
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert "mine" in shown
    assert not {"\x1b", "\x07", "\x9b", "\u202e", "\r"} & set(shown)


def test_what_kubectl_complains_about_is_printed_so_too(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.answer({"get": f"Error from server: {HOSTILE} mine"})
    assert cli.main(["why", "llm"]) == 3
    assert "\x1b" not in capsys.readouterr().err


# What else prints: the pictures of watch, manifests as their file has them.
PRINTS = {"terminal.py", "watch.py", "import_command.py"}


def test_every_command_prints_through_one_function() -> None:
    """print() is called in few places, of which each knows what it prints."""
    files = some(sorted(Path(elastipod_client.__file__).parent.glob("*.py")))
    printing = {
        file.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert printing == PRINTS
