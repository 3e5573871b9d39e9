"""Weights of checkpoints in safetensors files, written and read by the package itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.nonempty import every, some
from tests.unit.checkpoint.trainer import Trainer, entries, flip_a_byte, shard
from tests.unit.torch_processes import TorchProcesses
from torch.optim.swa_utils import AveragedModel

from elastipod.checkpoint import CheckpointManager, export_weights
from elastipod.cli import main
from elastipod.errors import CheckpointError


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A directory with steps 1 to 3; the weights after step n are those of ``trained(n)``."""
    folder, run = tmp_path / "checkpoints", Trainer()
    with CheckpointManager(folder, memory=False, keep=9) as manager:
        for step in (1, 2, 3):
            run.step(step)
            run.save(manager, step)
    return folder


def trained(steps: int) -> torch.nn.Module:
    run = Trainer()
    for step in range(1, steps + 1):
        run.step(step)
    return run.model


def same(file: Path, model: torch.nn.Module) -> bool:
    found, wanted = load_file(file), model.state_dict()
    return found.keys() == wanted.keys() and every(
        found[key].dtype == wanted[key].dtype and torch.equal(found[key], wanted[key]) for key in wanted
    )


@pytest.mark.parametrize(("step", "exported"), [(None, 3), (2, 2)])
def test_the_weights_of_a_step_are_exported(checkpoints: Path, tmp_path: Path, step: int | None, exported: int) -> None:
    before = {path: path.stat().st_mtime_ns for path in checkpoints.rglob("*")}
    done = export_weights(checkpoints, tmp_path / "weights.safetensors", step=step)
    assert (done.step, done.num_tensors, done.num_bytes, done.left_out) == (
        exported,
        4,
        4 * (4 * 8 + 8 + 8 * 2 + 2),
        (),
    )
    assert same(done.path, trained(exported))
    with safe_open(done.path, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": str(exported)}
    assert {path: path.stat().st_mtime_ns for path in checkpoints.rglob("*")} == before, "nothing is changed or claimed"
    assert entries(tmp_path) == ["checkpoints", "weights.safetensors"]


def test_the_folder_of_one_checkpoint_is_exported(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder,) = checkpoints.glob("step-0000000002-*")
    assert same(export_weights(folder, tmp_path / "a.safetensors").path, trained(2))
    monkeypatch.chdir(checkpoints)
    assert same(export_weights(folder.name, tmp_path / "b.safetensors").path, trained(2))
    assert same(export_weights(f"file://{folder}/", tmp_path / "c.safetensors").path, trained(2))


def test_one_of_several_models_is_exported_and_an_average_has_the_names_of_its_model(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(torch.bfloat16)
    average = AveragedModel(model, use_buffers=True)
    average.update_parameters(model)
    optimizer = torch.optim.SGD(model.parameters())
    with CheckpointManager(tmp_path / "checkpoints", memory=False) as manager:
        manager.save(1, model={"student": model, "mean": average}, optimizer=optimizer)
    for name in ("student", "mean"):
        assert same(export_weights(tmp_path / "checkpoints", tmp_path / f"{name}.st", model=name).path, model)
    whole = load_file(export_weights(tmp_path / "checkpoints", tmp_path / "all.st").path)
    assert {key.partition(".")[0] for key in whole} == {"student", "mean"}
    with pytest.raises(CheckpointError, match="has no model teacher; its weights begin with mean, student"):
        export_weights(tmp_path / "checkpoints", tmp_path / "no.st", model="teacher")


class Extra(torch.nn.Linear):
    """A layer with a state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"scale": 2}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_what_is_no_tensor_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Extra(2, 2)
    with CheckpointManager(tmp_path / "checkpoints", memory=False) as manager:
        manager.save(1, model=model, optimizer=torch.optim.SGD(model.parameters()))
    target = tmp_path / "weights.safetensors"
    assert main(["checkpoint", "export", str(tmp_path / "checkpoints"), "--to", str(target)]) == 0
    assert load_file(target).keys() == {"weight", "bias"}
    assert capsys.readouterr().out == (
        f"{target}: weights of step 1, 2 tensors, 0.0 MB; not a tensor, and left out: model._extra_state.scale\n"
    )


def test_a_file_is_replaced_only_when_told_to(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "weights.safetensors"
    target.write_text("mine")
    command = ["checkpoint", "export", str(checkpoints), "--to", str(target)]
    assert main(command) == 1
    assert capsys.readouterr().err == (
        f"elastipod checkpoint: {target} exists; name another file, or replace it (--force, replace=True)\n"
    )
    assert target.read_text() == "mine"
    assert main([*command, "--force", "--step", "1"]) == 0
    assert same(target, trained(1))


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("nowhere", {}, "nowhere has no complete checkpoint; complete steps: none"),
        ("checkpoints", {"step": 9}, "checkpoints has no checkpoint of step 9; complete steps: 1, 2, 3"),
        (
            "checkpoints/step-0000000009-gen-000001",
            {},
            "gen-000001 has no complete checkpoint; complete steps: 1, 2, 3",
        ),
    ],
)
def test_a_checkpoint_that_is_not_there_is_named(
    checkpoints: Path, tmp_path: Path, source: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        export_weights(tmp_path / source, tmp_path / "weights.st", **options)
    assert entries(tmp_path) == ["checkpoints"]


def test_damaged_weights_are_never_exported(checkpoints: Path, tmp_path: Path) -> None:
    (folder,) = checkpoints.glob("step-0000000003-*")
    file = shard(folder)
    flip_a_byte(file)
    content = bytearray(file.read_bytes())
    content[300:340] = bytes(40)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step 3 is damaged: .*; other steps: 2, 1$"):
        export_weights(checkpoints, tmp_path / "weights.st")
    assert entries(tmp_path) == ["checkpoints"]


def test_a_target_that_cannot_be_written_is_named(checkpoints: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write .*nowhere/weights\.st: "):
        export_weights(checkpoints, tmp_path / "nowhere" / "weights.st")


@pytest.mark.slow
def test_a_missing_package_is_one_sentence(torch_processes: TorchProcesses, checkpoints: Path, tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['safetensors'] = None; from elastipod.cli import main; "
        f"sys.exit(main(['checkpoint', 'export', {str(checkpoints)!r}, '--to', {str(tmp_path / 'w.st')!r}]))"
    )
    done = torch_processes.run(script)
    assert done.returncode == 1
    (line,) = some(done.stderr.splitlines())
    assert line.startswith("elastipod checkpoint: exporting needs the package safetensors (")
    assert line.endswith("; in a checkout of elastipod, run: pip install '.[export]'")


def test_the_command_needs_to_be_told_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(
        "elastipod checkpoint: error: the following arguments are required: ACTION\n"
    )
