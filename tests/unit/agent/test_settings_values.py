"""Every setting with every option given, without any, and at the ends of its range."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from elastipod_agent.arguments import parse
from elastipod_agent.log_settings import StreamSelection, parse_filters, parse_stream_selection
from elastipod_agent.settings import BadUsage, Script, Settings, read_settings


def read(*arguments: str, **environ: str) -> Settings:
    return read_settings(parse(arguments, environ), environ)[0]


def test_all_that_is_given_is_kept(tmp_path: Path) -> None:
    settings = read(
        "--server-host=::1", "--server-port=65535", "--server-log-level=DEBUG", "--shutdown-signal=SIGTERM",
        "--shutdown-timeout=4", "--server-shutdown-timeout=5", "--nproc-per-node=2", "--rdzv-id=run", "--role=trainer",
        "--max-restarts=6", "--inprocess-restart", "--inprocess-timeout=7", "--pre-train-script=pre.sh",
        "--pre-train-args=a 'b c'", "--post-train-script=post.py", "--post-train-args=d", "--no-warm-workers",
        "--preload=numpy, my.pack,,", "--hang-timeout=8.5", "--metrics-port=9", f"--log-dir={tmp_path}",
        "--redirects=1", "--tee=0:2", "--log-line-prefix-template=[${rank}] ", "--local-ranks-filter=0,1",
        "--duplicate-stdout-filters=loss,,x,error", "--duplicate-stderr-filters=warn", "t.py", ELASTIPOD_JOB="team/a",
    )  # fmt: skip
    layout, logs = settings.layout, settings.logs
    assert (settings.host, settings.port, settings.server_log_level) == ("::1", 65535, "debug")
    assert (settings.shutdown_signal, settings.shutdown_timeout_s) == (signal.SIGTERM, 4)
    assert (settings.server_shutdown_timeout_s, settings.inprocess_timeout_s) == (5, 7)
    assert (layout.nproc, layout.run_id, layout.role, layout.max_restarts) == (2, "run", "trainer", 6)
    assert (layout.keeps_processes, settings.is_inprocess, settings.is_warm) == (True, True, False)
    assert settings.pre_script == Script("pre.sh", ("a", "b c"))
    assert settings.post_script == Script("post.py", ("d",))
    assert (settings.preload, settings.hang_timeout_s, settings.metrics_port) == (("numpy", "my.pack"), 8.5, 9)
    assert (settings.is_python, settings.script_file, settings.job) == (True, "t.py", "team/a")
    assert (logs.redirects, logs.tee) == (StreamSelection(1), StreamSelection(by_rank={0: 2}))
    assert (logs.prefix.template, logs.only_local_ranks) == ("[${rank}] ", frozenset({0, 1}))
    assert (logs.stdout_filters, logs.stderr_filters) == (("loss,x", "error"), ("warn",))
    assert logs.directory is not None
    assert (logs.directory.parent, logs.directory.name[:4]) == (tmp_path, "run_")
    assert logs.directory.is_dir()


def test_what_an_agent_does_without_any_option() -> None:
    settings = read("t.py")
    layout, logs = settings.layout, settings.logs
    assert (settings.host, settings.port, settings.server_log_level) == ("", 8080, "info")
    assert (settings.shutdown_signal, settings.shutdown_timeout_s) == (signal.SIGKILL, 15)
    assert (settings.server_shutdown_timeout_s, settings.inprocess_timeout_s) == (300, 600)
    assert (layout.nproc, layout.run_id, layout.role, layout.max_restarts) == (1, "none", "default", 0)
    assert (layout.keeps_processes, settings.is_inprocess, settings.is_warm) == (False, False, True)
    assert (settings.pre_script, settings.post_script, settings.preload) == (None, None, ())
    assert (settings.hang_timeout_s, settings.metrics_port, settings.job, settings.cpus) == (None, 0, "", ())
    assert (logs.directory, logs.redirects, logs.tee) == (None, StreamSelection(0), StreamSelection(0))
    assert (logs.prefix.template, logs.only_local_ranks) == ("[${role_name}${local_rank}]:", None)
    assert (logs.stdout_filters, logs.stderr_filters) == ((), ())


@pytest.mark.parametrize(
    ("arguments", "environ", "run_id"),
    [
        ([], {}, "none"),
        ([], {"ELASTIPOD_JOB": "team/a"}, "team/a"),
        (["--rdzv-id=none"], {"ELASTIPOD_JOB": "team/a"}, "team/a"),
        (["--rdzv-id=mine"], {"ELASTIPOD_JOB": "team/a"}, "mine"),
    ],
)
def test_the_id_of_the_run(arguments: list[str], environ: dict[str, str], run_id: str) -> None:
    assert read(*arguments, "t.py", **environ).layout.run_id == run_id


@pytest.mark.parametrize(
    ("option", "name", "value", "expected"),
    [
        ("--server-port", "port", "0", 0),
        ("--metrics-port", "metrics_port", "0", 0),
        ("--metrics-port", "metrics_port", "65535", 65535),
        ("--shutdown-timeout", "shutdown_timeout_s", "0", 0),
        ("--server-shutdown-timeout", "server_shutdown_timeout_s", "0", 0),
        ("--inprocess-timeout", "inprocess_timeout_s", "0", 0),
        ("--hang-timeout", "hang_timeout_s", "0", 0),
        ("--hang-timeout", "hang_timeout_s", "auto", None),
        ("--hang-timeout", "hang_timeout_s", "0.5", 0.5),
    ],
)
def test_values_at_the_ends_of_their_range(option: str, name: str, value: str, expected: Any) -> None:
    assert getattr(read(f"{option}={value}", "t.py"), name) == expected


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--server-port=65536", "--server-port is '65536'; it must be a port number"),
        ("--server-port=-1", "--server-port is '-1'; it must be a port number"),
        ("--metrics-port=65536", "--metrics-port is 65536; it must be a port number, or 0 for none"),
        ("--metrics-port=-1", "--metrics-port is -1; it must be a port number, or 0 for none"),
        ("--server-shutdown-timeout=-1", "--server-shutdown-timeout is -1; it must not be negative"),
        ("--inprocess-timeout=-2", "--inprocess-timeout is -2; it must not be negative"),
        ("--max-restarts=-1", "--max-restarts is -1; it must not be negative"),
        ("--hang-timeout=soon", "--hang-timeout is 'soon'; it must be auto, 0 or a number of seconds"),
        ("--hang-timeout=-0.1", "--hang-timeout is '-0.1'; it must be auto, 0 or a number of seconds"),
        ("--hang-timeout=inf", "--hang-timeout is 'inf'; it must be auto, 0 or a number of seconds"),
        ("--hang-timeout=nan", "--hang-timeout is 'nan'; it must be auto, 0 or a number of seconds"),
        ("--preload=a-b", "--preload names 'a-b', which is not a module name"),
        ("--preload=a.,b", "--preload names 'a.', which is not a module name"),
        ("--redirects=0:1,", "--redirects is '0:1,'; it must be 0 to 3, or such a value for each local rank"),
        ("--tee=0:4", "--tee is '0:4'; it must be 0 to 3, or such a value for each local rank like 0:1,1:3"),
        ("--local-ranks-filter=0,", "--local-ranks-filter is '0,'; it must be a list of local ranks like 0,1"),
        ("--nnodes=2:", "--nnodes is '2:'; it must be a number or MIN:MAX"),
        ("--pre-train-args='", "the arguments of pre.sh cannot be split: No closing quotation"),
    ],
)
def test_values_beyond_their_range_are_refused_with_a_sentence(argument: str, sentence: str) -> None:
    with pytest.raises(BadUsage, match=re.escape(sentence)):
        read(argument, "--pre-train-script=pre.sh", "t.py")


def test_a_bad_variable_is_named_as_such() -> None:
    with pytest.raises(BadUsage, match=r"^ELASTIPOD_AGENT_PORT is 'http'; it must be a port number$"):
        read("t.py", ELASTIPOD_AGENT_PORT="http")
    assert read("t.py", ELASTIPOD_AGENT_PORT="").port == 8080
    with pytest.raises(BadUsage, match="many"):
        read("t.py", NPROC_PER_NODE="many")
    assert read("t.py", NPROC_PER_NODE="").layout.nproc == 1


@pytest.mark.parametrize("text", ["", "$(RANK)", "3"])
@pytest.mark.parametrize("option", ["--node-rank", "--node_rank", "--master_port", "--master-addr", "--rdzv-endpoint"])
def test_what_another_operator_sets_in_its_pods_may_be_empty_or_unknown_in_ours(option: str, text: str) -> None:
    """Scripts for it pass its variables to torchrun. Nobody looks at the values here, and a warning says so."""
    assert read(f"{option}={text}", "t.py").layout.nproc == 1


@pytest.mark.parametrize("text", ["", "3", "2:8", "$(WORLD_SIZE)"])
def test_numbers_of_nodes_that_the_operator_sets(text: str) -> None:
    assert read(f"--nnodes={text}", "t.py").layout.nproc == 1


@pytest.mark.parametrize(
    ("text", "filters"),
    [("", ()), ("loss", ("loss",)), ("a b,c", ("a b", "c")), ("a,,b", ("a,b",)), (",a,", ("a",)), (",,", (",",))],
)
def test_texts_to_filter_by(text: str, filters: tuple[str, ...]) -> None:
    assert parse_filters(text) == filters


def test_streams_of_ranks_that_are_not_named_go_to_the_console() -> None:
    chosen = parse_stream_selection("--tee", "0:1,2:3")
    assert [chosen.of(rank) for rank in range(4)] == [1, 0, 3, 0]
    assert chosen.everywhere == 0
    assert parse_stream_selection("--tee", "2").by_rank is None


@pytest.mark.parametrize(
    ("arguments", "has_files"),
    [
        ([], False),
        (["--redirects=1"], True),
        (["--tee=2"], True),
        (["--tee=0:0"], True),
        (["--duplicate-stdout-filters=loss"], True),
        (["--duplicate-stderr-filters=loss"], True),
        (["--log-line-prefix-template=x"], False),
    ],
)
def test_which_options_need_files(
    arguments: list[str], has_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    settings, warnings = read_settings(parse([*arguments, "t.py"], {}), {"ELASTIPOD_JOB": "team/a b"})
    assert (settings.logs.directory is not None) is has_files
    assert warnings == (
        [f"log files of the workers go to {settings.logs.directory}, because --log-dir is not given"]
        if has_files
        else []
    )
    if settings.logs.directory is not None:
        assert settings.logs.directory.name.startswith("team_a_b_")


def test_a_log_directory_is_made_with_its_parents_and_shared(tmp_path: Path) -> None:
    first, second = (read(f"--log-dir={tmp_path}/a/b", "t.py").logs.directory for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.parent == second.parent == tmp_path / "a/b"
    assert first != second
    assert read_settings(parse([f"--log-dir={tmp_path}", "t.py"], {}), {})[1] == []


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadUsage, match=f"^--log-dir {tmp_path}/file/x cannot be written: Not a directory$"):
        read(f"--log-dir={tmp_path}/file/x", "t.py")
    with monkeypatch.context() as changed:
        changed.setattr("tempfile.tempdir", None)
        changed.setattr("tempfile._candidate_tempdir_list", lambda: [f"{tmp_path}/none"])
        with pytest.raises(BadUsage, match=r"^--log-dir is not given, and none can be made: No usable temporary"):
            read("--tee=3", "t.py")
    monkeypatch.setattr("tempfile.tempdir", f"{tmp_path}/none")
    with pytest.raises(BadUsage, match=f"^--log-dir {tempfile.gettempdir()} cannot be written: No such file"):
        read("--tee=1", "t.py")


def test_the_prefix_of_torch_is_used_unless_one_is_given() -> None:
    torchs = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[torch]"}
    assert read("t.py", **torchs).logs.prefix.template == "[torch]"
    assert read("--log-line-prefix-template=[own]", "t.py", **torchs).logs.prefix.template == "[own]"


@pytest.mark.parametrize(
    ("arguments", "is_python", "script_file"),
    [(["t.py"], True, "t.py"), (["-m", "pkg"], True, None), (["--no-python", "./run"], False, None)],
)
def test_which_file_must_exist(arguments: list[str], is_python: bool, script_file: str | None) -> None:
    settings = read(*arguments)
    assert (settings.is_python, settings.script_file) == (is_python, script_file)


def test_a_script_by_its_path_sees_itself_as_main(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import sys; print(__name__, sys.argv)")
    command = read("--run-path", str(tmp_path / "t.py"), "-x").command
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"__main__ ['{tmp_path / 't.py'}', '-x']\n"
    assert command[0] == sys.executable


def test_scripts_of_python_are_run_by_it_even_if_they_can_be_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "s.py"
    script.touch(mode=0o755)
    assert Script(str(script), ("a",)).command() == [sys.executable, str(script), "a"]
    (tmp_path / "run").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    assert Script("run", ()).command() == [str(tmp_path / "run")]
    for path, number in ((str(tmp_path), "Is a directory"), (str(tmp_path / "none"), "No such file or directory")):
        with pytest.raises(OSError, match=number) as refused:
            Script(path, ()).command()
        assert refused.value.filename == path


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        ([], []),
        (["--max-restarts=3"], ["--max-restarts has no effect inside a pod: "]),
        (["--node-rank=1", "--node-rank=2"], ["--node-rank has no effect inside a pod: "]),
        (["--rdzv-endpoint=a:1", "--local-addr=b", "--start-method=fork"],
         ["--rdzv-endpoint, --local-addr have no effect inside a pod: ", "--start-method has no effect inside a pod: "]),
    ],
)  # fmt: skip
def test_options_without_effect_are_grouped_by_the_reason(arguments: list[str], sentences: list[str]) -> None:
    warnings = read_settings(parse([*arguments, "t.py"], {}), {})[1]
    assert [warning.partition(": ")[0] + ": " for warning in warnings] == sentences


def test_variables_without_effect_are_named_like_options() -> None:
    environ = {"PET_MASTER_PORT": "5", "PET_NODE_RANK": "1", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_CONF": ""}
    warnings = read_settings(parse(["--node-rank=1", "t.py"], environ), environ)[1]
    why = "inside a pod: the operator sets ranks, world size and master"
    assert warnings == [
        "PET_RDZV_BACKEND=c10d is not used: inside a pod the rendezvous backend is always hyperpod",
        f"--node-rank, PET_MASTER_PORT have no effect {why}",
    ]


def test_torchruns_variables_are_defaults(tmp_path: Path) -> None:
    on = read("t.py", PET_TEE="3", PET_LOG_DIR=str(tmp_path), PET_ROLE="trainer", PET_NNODES="4")
    assert (on.logs.tee, on.layout.role) == (StreamSelection(3), "trainer")
    assert read("--role=mine", "t.py", PET_ROLE="trainer").layout.role == "mine"
    for text, is_module in (("1", True), ("true", True), ("0", False), (" 0 ", False), ("", False)):
        assert ("-m" in read("t", PET_MODULE=text).command) is is_module
    assert read("t.py", PET_SHUTDOWN_SIGNAL="SIGTERM").shutdown_signal == signal.SIGKILL, "not an option of torchrun"
