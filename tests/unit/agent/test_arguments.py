"""The command line, and its table of torchrun's options against the installed torch's own parser."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from elastipod_agent import torchrun
from elastipod_agent.arguments import EPILOG, UnknownOption, build_parser, parse
from elastipod_agent.main import parse_command_line
from elastipod_agent.options import OWN_OPTIONS, TORCHRUN_OPTIONS, Option
from elastipod_agent.settings import read_settings
from elastipod_agent.torchrun import torchrun_arguments

OURS = {option.dest for option in OWN_OPTIONS}
TABLE = {option.dest: option for option in TORCHRUN_OPTIONS}


def torchs_actions() -> list[argparse.Action]:
    return [action for action in get_args_parser()._actions if action.option_strings and action.dest != "help"]


@pytest.mark.parametrize("action", torchs_actions(), ids=lambda action: action.dest)
def test_the_table_has_the_installed_torchs_option(action: argparse.Action) -> None:
    if action.dest in OURS:
        return
    assert action.dest in TABLE, f"torch has a new option {action.option_strings}: add it to TORCHRUN_OPTIONS"
    option = TABLE[action.dest]
    assert set(action.option_strings) <= set(option.spellings)
    assert (action.nargs == 0) == (option.kind is None), f"{action.dest}: is it a flag?"
    if option.dest != "print_completion":  # its shells depend on another package
        assert tuple(action.choices or ()) == (option.choices or ())
    if action.nargs != 0:
        assert str(action.default or None) in (str(option.default or None), "[]"), f"{action.dest}: another default"


def test_dashes_underscores_and_abbreviations() -> None:
    line = parse(
        ["--nproc_per_node=8", "--log_dir", "/l", "--redirect", "3", "--nnode=2:8", "--server_port", "9", "t.py"], {}
    )
    values = line.values
    assert (values.nproc_per_node, values.log_dir, values.redirects, values.nnodes) == ("8", "/l", "3", "2:8")
    assert values.server_port == 9
    assert parse(["--nproc=4", "t.py"], {}).values.nproc_per_node == "4"


def torchs_reading(word: str) -> str | None:
    """Tell which option the installed torch takes an abbreviation for, None when it takes it for none."""
    parser = get_args_parser()
    found = {id(match[0]): match[0].dest for match in parser._get_option_tuples(word)}
    exact = parser._option_string_actions.get(word)
    names = {exact.dest} if exact else set(found.values())
    return names.pop() if len(names) == 1 else None


ABBREVIATIONS = sorted(
    {
        name[:end]
        for action in torchs_actions()
        for name in action.option_strings
        if name.startswith("--")
        for end in range(3, len(name) + 1)
    }
)


def test_every_abbreviation_that_torchrun_takes_means_the_same_here() -> None:
    parser = build_parser({})
    read = {word: dest for word in ABBREVIATIONS if (dest := torchs_reading(word)) is not None}
    assert len(read) > 300
    for word, dest in read.items():
        exact = parser._option_string_actions.get(word)
        found = [exact] if exact else [match[0] for match in parser._get_option_tuples(word)]
        assert [action.dest for action in found] == [dest], word


@pytest.mark.parametrize("word", ["--no-w", "--no_warm", "--inprocess-r", "--server-p", "--hang", "--metrics_p"])
def test_our_own_options_may_be_shortened_too(word: str) -> None:
    value = [] if word.startswith(("--no", "--inprocess")) else ["9"]
    line = parse([word, *value, "t.py"], {})
    assert [option in OWN_OPTIONS for option, _ in line.given] == [True]


@pytest.mark.parametrize("option", TORCHRUN_OPTIONS, ids=lambda option: option.dest)
def test_each_of_torchruns_options_is_obeyed_in_a_pod_or_warned_of(
    option: Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    obeyed = {
        *(
            "nproc_per_node",
            "module",
            "no_python",
            "run_path",
            "log_dir",
            "redirects",
            "tee",
            "log_line_prefix_template",
        ),
        *("local_ranks_filter", "duplicate_stdout_filters", "duplicate_stderr_filters", "role", "rdzv_id"),
        *("virtual_local_rank", "standalone", "print_completion", "nnodes"),
    }
    value = {"log_dir": str(tmp_path), "numa_binding": "node", "start_method": "fork", "print_completion": "bash"}
    text = value.get(option.dest, "1")
    line = parse([option.name, *([] if option.kind is None else [text]), "t.py"], {})
    warnings = read_settings(line, {})[1]
    makes_files = {
        "redirects",
        "tee",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
    }  # warned of where they go
    assert bool(warnings) == (option.dest not in obeyed or option.dest in makes_files)
    if option.unused:
        assert warnings == [f"{option.name} has no effect inside a pod: {option.unused}"]


def test_what_follows_the_script_is_the_scripts() -> None:
    line = parse(["--tee", "3", "t.py", "--tee", "1", "--server-port=1", "-m", "--what"], {})
    assert line.script == "t.py"
    assert line.script_args == ("--tee", "1", "--server-port=1", "-m", "--what")
    assert line.values.tee == "3"


def test_torchruns_environment_gives_defaults() -> None:
    values = parse(["t.py"], {"PET_NPROC_PER_NODE": "4", "PET_MAX_RESTARTS": "2", "PET_STANDALONE": "1"}).values
    assert (values.nproc_per_node, values.max_restarts, values.standalone) == ("4", 2, True)
    assert parse(["--max-restarts=5", "t.py"], {"PET_MAX_RESTARTS": "2"}).values.max_restarts == 5


def test_a_wrong_variable_ends_with_code_2_and_names_the_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["t.py"], {"PET_NUMA_BINDING": ""}).values.numa_binding is None
    assert parse(["t.py"], {"PET_NUMA_BINDING": "socket"}).values.numa_binding == "socket"
    assert parse(["--numa-binding=node", "t.py"], {"PET_NUMA_BINDING": "x"}).values.numa_binding == "node"
    with pytest.raises(SystemExit) as ended:
        parse(["t.py"], {"PET_NUMA_BINDING": "all"})
    assert ended.value.code == 2
    said = "PET_NUMA_BINDING is 'all'; it must be one of node, socket, exclusive, core-complex"
    assert said in capsys.readouterr().err


def test_an_option_of_a_newer_torch_is_learned_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownOption):
        parse(["--brand-new", "5", "t.py"], {})
    monkeypatch.setattr(torchrun, "installed_options", lambda: [Option(("--brand-new",))])
    line = parse_command_line(["--brand-new", "5", "t.py"], {})
    assert line.values.brand_new == "5"
    assert line.script == "t.py"
    assert torchrun_arguments(line, has_shutdown_timeout=True) == ["--brand-new=5", "t.py"]


def test_a_learned_option_is_warned_of_in_a_pod() -> None:
    newer = Option(("--brand-new",), unused="it is newer")
    line = parse(["--brand-new=5", "t.py"], {}, learned=[newer])
    assert read_settings(line, {})[1] == ["--brand-new has no effect inside a pod: it is newer"]


def test_without_torch_an_unknown_option_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert torchrun.installed_options() == []


def test_an_option_that_nobody_knows_ends_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    last_words = tmp_path / "termination-log"
    last_words.touch()
    monkeypatch.setenv("ELASTIPOD_TERMINATION_LOG", str(last_words))
    monkeypatch.setattr(torchrun, "installed_options", list)
    with pytest.raises(SystemExit) as caught:
        parse_command_line(["--nonsense", "t.py"], {})
    assert caught.value.code == 2
    assert "--nonsense" in capsys.readouterr().err
    assert last_words.read_text("utf-8") == "hyperpodrun: unrecognized arguments: --nonsense"


def test_torchrun_gets_its_own_options_only() -> None:
    line = parse(
        [
            "--server-port=1",
            "--standalone",
            "--rdzv_backend=hyperpod",
            "--nproc=2",
            "--shutdown-timeout=9",
            "--pre-train-script=x",
            "-m",
            "pkg",
            "--server-port=2",
        ],
        {},
    )
    assert torchrun_arguments(line, has_shutdown_timeout=True) == [
        "--standalone",
        "--nproc-per-node=2",
        "--shutdown-timeout=9",
        "--module",
        "pkg",
        "--server-port=2",
    ]
    assert "--shutdown-timeout=9" not in torchrun_arguments(line, has_shutdown_timeout=False)
    assert get_args_parser().parse_args(torchrun_arguments(line, has_shutdown_timeout=True)).training_script == "pkg"


def test_help_names_both_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"], {})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "hyperpodrun's own options" in text
    assert "torchrun's options" in text
    assert "--pre-train-script" in text
    assert "--pre_train_script" not in text, "one spelling is enough"
    assert max(map(len, text.splitlines())) <= 120


def test_help_names_every_option_with_its_values_and_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((100, 40)))
    text = build_parser({}).format_help()
    assert text.startswith("usage: hyperpodrun [options] script [arguments of the script]\n")
    assert max(map(len, text.partition(EPILOG)[0].splitlines())) <= 98, "it fits the terminal"
    for line in (
        "  -t, --tee STREAMS ", "  -m, --module ", "  --role ROLE ", "  --shutdown-signal {SIGKILL,SIGTERM}",
        "  --numa-binding {node,socket,exclusive,core-complex}",
    ):  # fmt: skip
        assert f"\n{line}" in text
    words = " ".join(text.split())
    assert "Run the workers of one pod of an elastic training job under the control of the operator." in words
    assert " ".join(EPILOG.split()) in words
    assert all(
        " ".join((option.help or option.unused).split()) in words for option in (*TORCHRUN_OPTIONS, *OWN_OPTIONS)
    )
    assert "_" not in "".join(part for part in text.split() if part.startswith("--")), "one spelling of each"
    for place, title in enumerate(
        ("torchrun's options:", "hyperpodrun's own options:", "no effect inside a pod, and why:")
    ):
        assert text.index(title) > place * 100
    assert text.index("  --max-restarts N") > text.index("no effect inside a pod") > text.index("  --metrics-port PORT")


def test_without_a_terminal_help_has_its_usual_width(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_terminal(*_: int) -> os.terminal_size:
        raise OSError

    monkeypatch.setattr("os.get_terminal_size", no_terminal)
    usual = build_parser({}).format_help()
    monkeypatch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((1000, 40)))
    assert build_parser({}).format_help() == usual


def test_the_installed_launcher_is_found() -> None:
    source = torchrun._launcher_source()
    assert "def get_args_parser" in source.read_text("utf-8")
