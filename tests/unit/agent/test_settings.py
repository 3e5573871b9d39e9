"""Settings read from command line and environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elastipod_agent.arguments import parse
from elastipod_agent.core.numa import Topology
from elastipod_agent.log_settings import parse_stream_selection
from elastipod_agent.main import foreign_agent
from elastipod_agent.settings import BadUsage, Script, Settings, missing_script, read_settings


def read(*arguments: str, **environ: str) -> Settings:
    return read_settings(parse(arguments, environ), environ)[0]


@pytest.mark.parametrize(
    ("arguments", "environ", "port"),
    [
        pytest.param([], {}, 8080, id="the default"),
        pytest.param([], {"ELASTIPOD_AGENT_PORT": "9001"}, 9001, id="the operator's"),
        pytest.param(["--server-port=9002"], {"ELASTIPOD_AGENT_PORT": "9001"}, 9002, id="the flag wins"),
    ],
)
def test_port(arguments: list[str], environ: dict[str, str], port: int) -> None:
    assert read(*arguments, "t.py", **environ).port == port


@pytest.mark.parametrize(
    ("arguments", "environ", "nproc"),
    [
        pytest.param([], {}, 1, id="torchrun's default"),
        pytest.param([], {"NPROC_PER_NODE": "3"}, 3, id="the resource's"),
        pytest.param(["--nproc-per-node=2"], {"NPROC_PER_NODE": "3"}, 2, id="the flag wins"),
        pytest.param([], {"NPROC_PER_NODE": "3", "PET_NPROC_PER_NODE": "4"}, 4, id="torchrun's variable wins"),
    ],
)
def test_nproc(arguments: list[str], environ: dict[str, str], nproc: int) -> None:
    assert read(*arguments, "t.py", **environ).layout.nproc == nproc


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        pytest.param(["t.py", "-x"], (sys.executable, "-u", "t.py", "-x"), id="script"),
        pytest.param(["-m", "pkg", "-x"], (sys.executable, "-u", "-m", "pkg", "-x"), id="module"),
        pytest.param(["--no-python", "./run", "-x"], ("./run", "-x"), id="no python"),
    ],
)
def test_command(arguments: list[str], command: tuple[str, ...]) -> None:
    assert read(*arguments).command == command


def test_run_path_and_another_python() -> None:
    command = read("--run-path", "t.py", "-x", PYTHON_EXEC="/opt/python").command
    assert command[:3] == ("/opt/python", "-u", "-c")
    assert command[-2:] == ("t.py", "-x")


def test_the_local_rank_macro() -> None:
    assert read("t.py", "--out=${local_rank}.log").worker_command(3)[-1] == "--out=3.log"


def test_warnings_name_what_changes_nothing() -> None:
    line = parse(["--rdzv-backend=c10d", "--node-rank=1", "--master-port=5", "t.py"], {})
    _, warnings = read_settings(line, {})
    assert warnings[0].startswith("--rdzv-backend=c10d is not used")
    assert warnings[1] == (
        "--node-rank, --master-port have no effect inside a pod: the operator sets ranks, world size and master"
    )
    assert read_settings(parse(["--rdzv-backend=hyperpod", "t.py"], {}), {})[1] == []


@pytest.mark.parametrize(
    ("text", "bits"),
    [("0", (0, 0)), ("3", (3, 3)), ("0:1,1:2", (1, 2)), ("1:3", (0, 3))],
)
def test_streams(text: str, bits: tuple[int, int]) -> None:
    streams = parse_stream_selection("--tee", text)
    assert (streams.of(0), streams.of(1)) == bits


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tee=4"], "--tee is '4'"),
        (["--local-ranks-filter=a"], "--local-ranks-filter is 'a'"),
        (["--server-port=70000"], "--server-port is '70000'"),
        (["--shutdown-timeout=-1"], "--shutdown-timeout is -1"),
        (["--pre-train-script=x", "--pre-train-args='"], "cannot be split"),
        (["--no-python", "-m"], "cannot be used together"),
        (["--nnodes=a"], "--nnodes is 'a'"),
    ],
)
def test_bad_usage_names_the_option(arguments: list[str], words: str) -> None:
    with pytest.raises(BadUsage, match=words):
        read(*arguments, "t.py")


def test_scripts_run_by_what_they_are(tmp_path: Path) -> None:
    script = tmp_path / "s"
    script.write_text("true\n", "utf-8")
    assert Script(str(script), ("a",)).command() == ["/bin/sh", str(script), "a"]
    script.chmod(0o755)
    assert Script(str(script), ("a",)).command() == [str(script), "a"]
    python = tmp_path / "x.py"
    python.touch()
    assert Script(str(python), ()).command() == [sys.executable, str(python)]


def test_a_script_that_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Script(str(tmp_path / "missing.sh"), ()).command()
    with pytest.raises(IsADirectoryError):
        Script(str(tmp_path), ()).command()


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    missing = missing_script(read(str(tmp_path)))
    assert missing == f"training script {tmp_path} is a directory"
    (tmp_path / "__main__.py").touch()
    assert missing_script(read(str(tmp_path))) is None
    assert missing_script(read("-m", "no_such_module")) is None


def test_the_original_agent_beside_us_is_found(tmp_path: Path) -> None:
    assert foreign_agent([str(tmp_path)]) is None
    record = tmp_path / "hyperpod_elastic_agent-1.1.3.dist-info"
    record.mkdir()
    assert foreign_agent(["/nowhere", str(tmp_path)]) == str(record)


def test_each_worker_may_see_one_device_alone() -> None:
    devices = read("--virtual-local-rank", "--nproc=2", "t.py", CUDA_VISIBLE_DEVICES="4,5").layout.own_devices
    assert devices == ({"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "5"})
    assert read("t.py").layout.own_devices == ()
    with pytest.raises(BadUsage, match="but CUDA_VISIBLE_DEVICES names 1"):
        read("--virtual-local-rank", "--nproc=2", "t.py", CUDA_VISIBLE_DEVICES="4")


def test_where_cpus_cannot_be_bound_a_warning_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_topology(environ: object) -> Topology:
        return Topology(device_nodes=(0,), node_cpus={0: frozenset({0, 1})}, sockets={}, cores={}, caches={})

    monkeypatch.setattr("elastipod_agent.settings.read_topology", read_topology)
    assert read("--numa-binding=node", "t.py").cpus == (frozenset({0, 1}),)
    settings, warnings = read_settings(parse(["--numa-binding=node", "--nproc=2", "t.py"], {}), {})
    assert settings.cpus == ()
    assert warnings == ["--numa-binding=node is not applied: there is no device 1 for local rank 1"]


def test_files_without_a_log_directory_get_one_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    settings, warnings = read_settings(parse(["--tee=3", "t.py"], {}), {})
    assert settings.logs.directory is not None
    assert settings.logs.directory.parent == tmp_path
    assert str(settings.logs.directory) in warnings[0]
    assert read("t.py").logs.directory is None


@pytest.mark.parametrize(
    ("environ", "warned_of"),
    [
        pytest.param({}, [], id="nothing is set"),
        pytest.param({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, [], id="no handling"),
        pytest.param({"NCCL_ASYNC_ERROR_HANDLING": "2"}, ["NCCL_ASYNC_ERROR_HANDLING=2"], id="aborts without a word"),
        pytest.param(
            {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, ["TORCH_NCCL_ASYNC_ERROR_HANDLING=1"], id="ends the process"
        ),
        pytest.param({"NCCL_ASYNC_ERROR_HANDLING": "3"}, ["NCCL_ASYNC_ERROR_HANDLING=3"], id="by the former name"),
        pytest.param(
            {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "true"}, ["TORCH_NCCL_RETHROW_CUDA_ERRORS=true"], id="CUDA's errors"
        ),
        pytest.param({"TORCH_NCCL_RETHROW_CUDA_ERRORS": "False"}, [], id="CUDA's errors are kept in"),
    ],
)
def test_settings_that_end_or_spoil_kept_processes_are_warned_of(environ: dict[str, str], warned_of: list[str]) -> None:
    settings, warnings = read_settings(parse(["--inprocess-restart", "t.py"], {}), environ)
    assert settings.layout.keeps_processes
    assert [warning.split()[0] for warning in warnings] == warned_of
    assert ["--inprocess-restart" in warning for warning in warnings] == [True] * len(warned_of)
    settings, warnings = read_settings(parse(["t.py"], {}), environ)
    assert not settings.layout.keeps_processes
    assert not warnings, "workers that are replaced may end"
