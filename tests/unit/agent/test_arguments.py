"""The command line, and its table of torchrun's options against the installed torch's own parser."""

from __future__ import annotations

import argparse

import pytest
from torch.distributed.run import get_args_parser

from elastipod_agent import torchrun
from elastipod_agent.arguments import OWN_OPTIONS, TORCHRUN_OPTIONS, Option, UnknownOption, parse
from elastipod_agent.main import parse_command_line
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


def test_what_follows_the_script_is_the_scripts() -> None:
    line = parse(["--tee", "3", "t.py", "--tee", "1", "--server-port=1", "-m", "--what"], {})
    assert line.script == "t.py"
    assert line.script_args == ("--tee", "1", "--server-port=1", "-m", "--what")
    assert line.values.tee == "3"


def test_torchruns_environment_gives_defaults() -> None:
    values = parse(["t.py"], {"PET_NPROC_PER_NODE": "4", "PET_MAX_RESTARTS": "2", "PET_STANDALONE": "1"}).values
    assert (values.nproc_per_node, values.max_restarts, values.standalone) == ("4", 2, True)
    assert parse(["--max-restarts=5", "t.py"], {"PET_MAX_RESTARTS": "2"}).values.max_restarts == 5


def test_an_option_of_a_newer_torch_is_learned_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownOption):
        parse(["--brand-new", "5", "t.py"], {})
    monkeypatch.setattr(torchrun, "installed_options", lambda: [Option(("--brand-new",))])
    line = parse_command_line(["--brand-new", "5", "t.py"], {})
    assert line.values.brand_new == "5"
    assert line.script == "t.py"
    assert torchrun_arguments(line, has_shutdown_timeout=True) == ["--brand-new=5", "t.py"]


def test_an_option_that_nobody_knows_ends_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torchrun, "installed_options", list)
    with pytest.raises(SystemExit) as caught:
        parse_command_line(["--nonsense", "t.py"], {})
    assert caught.value.code == 2
    assert "--nonsense" in capsys.readouterr().err


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
