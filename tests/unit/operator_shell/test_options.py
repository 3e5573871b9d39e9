"""The operator's settings: what its environment, its command line and neither of them say."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, fields
from typing import Any

import pytest

from elastipod_operator.kube.node_signals import SignalEffect
from elastipod_operator.kube.scope import Scope
from elastipod_operator.options import Options, parse

# By field: the variable and its value, the words of the command line, and what either means.
SETTINGS: dict[str, tuple[str, str, tuple[str, ...], Any]] = {
    "namespaces": ("WATCH_NAMESPACES", " a, ,b ", ("--namespaces", " a, ,b "), ("a", "b")),
    "metrics_port": ("METRICS_PORT", "9000", ("--metrics-port", "9000"), 9000),
    "log_level": ("LOG_LEVEL", "debug", ("--log-level", "debug"), "debug"),
    "install_key_file": ("ELASTIPOD_INSTALL_KEY_FILE", "/key", ("--install-key-file", "/key"), "/key"),
    "webhook_port": ("WEBHOOK_PORT", "9443", ("--webhook-port", "9443"), 9443),
    "webhook_name": ("WEBHOOK_NAME", "hook.svc", ("--webhook-name", "hook.svc"), "hook.svc"),
    "webhook_certificates": ("WEBHOOK_CERTIFICATES", "/certs", ("--webhook-certificates", "/certs"), "/certs"),
    "webhook_configuration": ("WEBHOOK_CONFIGURATION", "hook", ("--webhook-configuration", "hook"), "hook"),
    "controller": ("ELASTIPOD_CONTROLLER_NAME", "blue", ("--controller-name", "blue"), "blue"),
    "only_named": ("ELASTIPOD_ONLY_NAMED", "true", ("--only-named",), True),
    "takes_over": ("ELASTIPOD_TAKE_OVER", "true", ("--take-over",), True),
    "node_signals": (
        "ELASTIPOD_NODE_SIGNALS", "drain taint a/b,ignore label c=d", ("--node-signals", " drain taint a/b, ,ignore label c=d"),
        {"taint a/b": SignalEffect.DRAIN, "label c=d": SignalEffect.IGNORE},
    ),
}  # fmt: skip
# Only the environment says these.
OF_THE_POD = {
    "pod_name": ("POD_NAME", "operator-0"),
    "pod_namespace": ("POD_NAMESPACE", "ops"),
    "release": ("RELEASE_NAME", "rel"),
}
DEFAULTS = {
    "namespaces": (), "metrics_port": 8081, "log_level": "info", "pod_name": "outside of a pod", "pod_namespace": "default",
    "is_pod": False, "install_key_file": "", "webhook_port": 0, "webhook_name": "127.0.0.1", "webhook_certificates": "",
    "webhook_configuration": "", "release": "", "controller": "elastipod", "only_named": False, "takes_over": False,
    "node_signals": {},
}  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*(each[0] for each in SETTINGS.values()), *(each[0] for each in OF_THE_POD.values())]:
        monkeypatch.delenv(name, raising=False)


def read(*argv: str) -> dict[str, Any]:
    found = asdict(parse([*argv]))
    if found["pod_name"] == f"{socket.gethostname()}-{os.getpid()}":
        found["pod_name"] = DEFAULTS["pod_name"]
    return found


def test_every_field_has_a_default_and_a_source() -> None:
    assert read() == DEFAULTS
    assert {each.name for each in fields(Options)} == {*SETTINGS, *OF_THE_POD, "is_pod"}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_environment_and_the_command_line_set_a_field_and_no_other(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    variable, text, words, value = SETTINGS[name]
    needed: tuple[str, ...] = ("--install-key-file", "/k") if name == "webhook_port" else ()
    changed = {**DEFAULTS, **({"install_key_file": "/k"} if needed else {}), name: value}
    assert read(*words, *needed) == changed
    monkeypatch.setenv(variable, text)
    assert read(*needed) == changed


@pytest.mark.parametrize("name", OF_THE_POD)
def test_the_pod_tells_its_own_names(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    variable, text = OF_THE_POD[name]
    monkeypatch.setenv(variable, text)
    assert read() == {**DEFAULTS, "is_pod": name == "pod_name", name: text}


@pytest.mark.parametrize("name", [name for name, each in SETTINGS.items() if len(each[2]) > 1])
def test_the_command_line_has_the_last_word(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    variable, _, words, value = SETTINGS[name]
    monkeypatch.setenv("ELASTIPOD_INSTALL_KEY_FILE", "/other")
    monkeypatch.setenv(variable, {"metrics_port": "1", "webhook_port": "1"}.get(name, "other"))
    assert read(*words)[name] == value


@pytest.mark.parametrize("name", ["only_named", "takes_over"])
@pytest.mark.parametrize("text", ["", "false", "True", "1"])
def test_only_true_is_true(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(SETTINGS[name][0], text)
    assert read()[name] is False


def test_an_empty_name_of_a_controller_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chart without the value sets the variable to nothing."""
    monkeypatch.setenv("ELASTIPOD_CONTROLLER_NAME", "")
    assert read()["controller"] == "elastipod"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--webhook-port=9443"], "--webhook-port needs --install-key-file"),
        (["--log-level=loud"], "invalid choice: 'loud'"),
        (["--metrics-port=http"], "invalid int value: 'http'"),
        (["--webhook-port=https", "--install-key-file=/k"], "invalid int value: 'https'"),
        *(
            (
                [f"--node-signals={entry}"],
                f"argument --node-signals: '{entry}' says nothing about a node; write drain, stop-placing or ignore,",
            )
            for entry in (
                "drain",
                "taint a",
                "evict taint a",
                "drain taint a:NoSchedule",
                "drain taint",
                "drain label a",
                "drain node a",
            )
        ),
    ],
)
def test_what_cannot_be_is_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_help_names_the_command_and_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert (ended.value.code, text.startswith("usage: elastipod operator ")) == (0, True)
    for words in (
        "{debug,info,warning,error}",
        "(default: 8081)",
        "(default: info)",
        "(default: 127.0.0.1)",
        "(default: elastipod)",
    ):
        assert words in text


def test_which_jobs_are_this_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELEASE_NAME", "rel")
    scope = parse(["--namespaces=a", "--controller-name=blue", "--only-named"]).scope
    assert scope == Scope("rel", ("a",), "blue", True)
    assert parse([]).scope == Scope("rel", (), "elastipod", False)
