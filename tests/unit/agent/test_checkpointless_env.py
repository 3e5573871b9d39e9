"""Variables of the original's checkpointless training on hyperpodrun's way to its settings."""

from __future__ import annotations

import re

import pytest

from elastipod_agent.arguments import parse
from elastipod_agent.settings import BadUsage, Settings, read_settings

BUILDS = "the builds of torch, gloo and NCCL that start groups without a store"


def read(*options: str, **environ: str) -> tuple[Settings, list[str]]:
    return read_settings(parse([*options, "t.py"], environ), environ)


@pytest.mark.parametrize(
    ("options", "variable", "timeout_s"),
    [
        pytest.param([], None, 600, id="the default"),
        pytest.param([], "", 600, id="an empty variable"),
        pytest.param([], "1800", 1800, id="the variable"),
        pytest.param([], "0", 0, id="no time at all"),
        pytest.param(["--inprocess-timeout=60"], "1800", 60, id="the option wins"),
        pytest.param(["--inprocess-timeout=60"], None, 60, id="the option"),
    ],
)
def test_time_to_come_back(options: list[str], variable: str | None, timeout_s: int) -> None:
    environ = {} if variable is None else {"INPROCESS_RESTART_TIMEOUT": variable}
    settings, warnings = read("--inprocess-restart", *options, **environ)
    assert settings.inprocess_timeout_s == timeout_s
    wanted = ["INPROCESS_RESTART_TIMEOUT=1800 has no effect beside --inprocess-timeout=60"]
    assert warnings == (wanted if options and variable else [])


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        (
            {"INPROCESS_RESTART_TIMEOUT": "30m"},
            "INPROCESS_RESTART_TIMEOUT is '30m'; it must be a number of seconds, as for --inprocess-timeout",
        ),
        ({"INPROCESS_RESTART_TIMEOUT": "-1"}, "INPROCESS_RESTART_TIMEOUT is '-1'; it must be a number of seconds"),
        ({"HPCT_USE_ROOTLESS": "yes"}, "HPCT_USE_ROOTLESS is 'yes'; it must be 0 or 1"),
        ({"TORCH_DIST_INIT_BARRIER": "true"}, "TORCH_DIST_INIT_BARRIER is 'true'; it must be 0 or 1"),
        ({"HPCT_PORT_BASE": "9000-9005"}, "HPCT_PORT_BASE is '9000-9005'; it must be a number from 1024 to 65535"),
        (
            {"TORCH_NCCL_GET_PORT_BASE": "x"},
            "TORCH_NCCL_GET_PORT_BASE is 'x'; it must be a number from 1024 to 65535",
        ),
        (
            {"TORCH_GLOO_GET_PORT_BASE": "x"},
            "TORCH_GLOO_GET_PORT_BASE is 'x'; it must be a number from 1024 to 65535",
        ),
        ({"N_PROC_PER_NODE": "auto"}, "N_PROC_PER_NODE is 'auto'; it must be a number, at least 1"),
        ({"NCCL_SOCKET_RETRY_DELAY": "1s"}, "NCCL_SOCKET_RETRY_DELAY is '1s'; it must be a number, at least 0"),
        (
            {"NPROC_PER_NODE": "8"},
            "nprocPerNode of the job is 8 (NPROC_PER_NODE), but --nproc-per-node is 4; with --inprocess-restart they must be equal",
        ),
    ],
)
def test_what_no_worker_could_train_with_is_refused(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(BadUsage, match=re.escape(sentence)):
        read("--inprocess-restart", "--nproc-per-node=4", **environ)
    assert read("--nproc-per-node=4", **environ)[1] == [], "nothing reads it without --inprocess-restart"


@pytest.mark.parametrize(
    ("environ", "warned_of"),
    [
        ({"HPCT_USE_ROOTLESS": "0", "TORCH_DIST_INIT_BARRIER": "1", "NCCL_SOCKET_RETRY_DELAY": "0"}, []),
        ({"HPCT_USE_ROOTLESS": "", "HPCT_PORT_BASE": " "}, []),
        ({"TORCH_DIST_INIT_BARRIER": "2"}, ["TORCH_DIST_INIT_BARRIER is 2; it should be 0 or 1"]),
        ({"NCCL_SOCKET_RETRY_DELAY": "-1"}, ["NCCL_SOCKET_RETRY_DELAY is -1; it should be a number, at least 0"]),
        ({"N_PROC_PER_NODE": "2"}, []),
        ({"N_PROC_PER_NODE": "8"}, ["N_PROC_PER_NODE is 8, but the pod has 2 workers (--nproc-per-node)"]),
        ({"NPROC_PER_NODE": "2"}, []),
        ({"NPROC_PER_NODE": "auto"}, []),
        ({"INPROCESS_RESTART": "1"}, []),
        (
            {"INPROCESS_RESTART": "0"},
            ["INPROCESS_RESTART=0 has no effect beside --inprocess-restart; remove one of them"],
        ),
    ],
)
def test_what_is_odd_is_said(environ: dict[str, str], warned_of: list[str]) -> None:
    settings, warnings = read("--inprocess-restart", "--nproc-per-node=2", **environ)
    assert settings.layout.nproc == 2
    assert warnings == warned_of


@pytest.mark.parametrize(("port", "is_odd"), [("1023", True), ("1024", False), ("65535", False), ("65536", True)])
def test_ports_that_cannot_be(port: str, is_odd: bool) -> None:
    _, warnings = read("--inprocess-restart", HPCT_PORT_BASE=port)
    assert ("HPCT_PORT_BASE is " + port + "; it should be a number from 1024 to 65535" in warnings) is is_odd
    assert warnings[-1].startswith(f"HPCT_PORT_BASE has an effect only in {BUILDS}")


def test_groups_without_a_store_are_not_promised() -> None:
    _, warnings = read("--inprocess-restart", HPCT_USE_ROOTLESS="1", TORCH_NCCL_GET_PORT_BASE="9000")
    (said,) = warnings
    assert said.startswith(
        f"HPCT_USE_ROOTLESS, TORCH_NCCL_GET_PORT_BASE have an effect only in {BUILDS}; any other build "
    )
    assert "MASTER_ADDR and MASTER_PORT" in said


@pytest.mark.parametrize(("value", "is_odd"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_variable_alone_keeps_no_process(value: str, is_odd: bool) -> None:
    settings, warnings = read(INPROCESS_RESTART=value)
    assert not settings.is_inprocess
    assert [w.split(" in the")[0] for w in warnings] == (
        [f"INPROCESS_RESTART={value} has no effect without --inprocess-restart"] if is_odd else []
    )
