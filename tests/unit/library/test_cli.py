"""The command `elastipod`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.nonempty import every
from tests.unit.library.sample_logs import PLAN, Job

from elastipod import cli, distribution


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: elastipod COMMAND ..."
    at = lines.index("commands:") + 1
    named = [line.split(maxsplit=1) for line in lines[at : lines.index("", at)]]
    assert named == [[name, command.summary] for name, command in cli.COMMANDS.items()]
    assert len({line.index(summary) for line, (_, summary) in zip(lines[at:], named, strict=False)}) == 1, "a column"


def test_help_says_what_it_is_for_and_where_the_rest_is(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for option in ("-h", "--help", "help"):
        assert cli.main([option]) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    assert texts[0].startswith(
        "usage: elastipod COMMAND ...\n\nElastic PyTorch training on Kubernetes: jobs that grow, shrink and recover "
        "without losing their place in the data.\n\ncommands:\n  agent       show "
    )
    assert texts[0].endswith(
        "\n\n`elastipod COMMAND --help` explains one command. In a pod, `hyperpodrun` starts the training script\n"
        "in place of torchrun; `hyperpodrun --help` lists its options.\n"
    )


def test_a_part_without_an_extra_is_in_the_package_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "audit", cli.Command("no_such_package.cli", ""))
    assert cli.main(["audit"]) == 2
    assert capsys.readouterr().err == (
        "elastipod audit: this installation lacks the package 'no_such_package'; "
        "in a checkout of elastipod, run: pip install .\n"
    )


def test_no_command_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: elastipod COMMAND" in capsys.readouterr().out


def test_an_unknown_command_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["frobnicate"]) == 2
    assert (
        capsys.readouterr().err
        == f"elastipod: no command 'frobnicate'; commands are: {', '.join(sorted(cli.COMMANDS))}\n"
    )


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("elastipod ")
    monkeypatch.setattr(cli, "installed_version", {"elastipod": "1.2.3"}.get)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "elastipod 1.2.3\n"
    monkeypatch.setattr(cli, "installed_version", lambda name: None)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "elastipod (not installed; run from source)\n"


def test_arguments_and_exit_status_are_handed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Job(tmp_path).run(1, 2, range(1, PLAN.total_steps + 1), end="completed")
    assert cli.main(["audit", str(tmp_path)]) == 0
    assert "exactly once" in capsys.readouterr().out


def test_a_missing_part_is_said_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "local", cli.Command("no_such_package.cli", "", "local"))
    assert cli.main(["local", "up"]) == 2
    assert capsys.readouterr().err == (
        "elastipod local: this installation lacks the package 'no_such_package'; "
        "in a checkout of elastipod, run: pip install '.[local]'\n"
    )


def test_the_slim_wheel_names_itself_or_the_machine_for_other_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(distribution, "installed_version", {"elastipod-agent": "1.2.3"}.get)
    monkeypatch.setitem(cli.COMMANDS, "recipe", cli.Command("no_such_package.cli", "", "recipes"))
    assert cli.main(["recipe"]) == 2
    assert capsys.readouterr().err.endswith("run: pip install 'elastipod-agent[recipes]'\n"), (
        "not the other wheel beside it"
    )
    monkeypatch.setitem(cli.COMMANDS, "audit", cli.Command("no_such_package.cli", ""))
    assert cli.main(["audit"]) == 2
    assert capsys.readouterr().err.endswith("build the wheel elastipod-agent with `make wheels` and install it again\n")
    monkeypatch.setitem(sys.modules, "elastipod_client", None)
    monkeypatch.delitem(sys.modules, "elastipod_client.why", raising=False)
    assert cli.main(["why", "job"]) == 2
    assert capsys.readouterr().err == (
        "elastipod why: the wheel elastipod-agent has no such command; "
        "on your own machine, in a checkout of elastipod, run: pip install .\n"
    )


def test_a_part_for_newer_pythons_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(cli.COMMANDS, "local", cli.Command("no_such_package.cli", "", "local", (3, 99)))
    assert cli.main(["local", "up"]) == 2
    found = "{}.{}".format(*sys.version_info)
    assert capsys.readouterr().err == f"elastipod local: needs Python 3.99 or newer; this is Python {found}\n"


RUN = "import sys; from elastipod import cli; cli.COMMANDS['audit'] = cli.Command('{module}', ''); sys.exit(cli.main(['audit']))"


@pytest.mark.parametrize(
    ("body", "unbuffered", "status"),
    [
        pytest.param("print('line\\n' * 100_000)\n    return 1", "", 0, id="while the command runs"),
        pytest.param("print('line')\n    return 1", "1", 0, id="without a buffer"),
        pytest.param("print('line')\n    return 1", "", 1, id="the status of a command that has ended stands"),
        pytest.param("print('line')\n    raise SystemExit(0)", "", 0, id="behind an exit, as of --help"),
    ],
)
def test_a_command_ends_quietly_when_nobody_reads_its_output(
    tmp_path: Path, body: str, unbuffered: str, status: int
) -> None:
    (tmp_path / "printing.py").write_text(f"def main(argv):\n    {body}\n")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(module="printing")], stdout=writer, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (status, "")


def test_a_broken_connection_is_no_reader_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("connecting")

    def broken(argv: list[str]) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(module, "main", broken, raising=False)
    monkeypatch.setitem(sys.modules, "connecting", module)
    monkeypatch.setitem(cli.COMMANDS, "audit", cli.Command("connecting", ""))
    with pytest.raises(BrokenPipeError):
        cli.main(["audit"])


def test_every_public_name_loads() -> None:
    import elastipod

    assert every(callable(getattr(elastipod, name)) for name in elastipod.__all__)
    assert set(elastipod.__all__) <= set(dir(elastipod))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'; it exports Batch, "):
        _ = elastipod.nonsense
