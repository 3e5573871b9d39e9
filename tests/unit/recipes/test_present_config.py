"""Which configuration a start reads: that of its own number of pods, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastipod.errors import RecipeError
from elastipod.recipes.present_config import present_config


def folder(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).write_text("a: 1\n")
    return tmp_path


def test_each_size_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = folder(tmp_path, "config.yaml", "config-n1.yaml", "config-n4.yaml", "config-n16.yaml")
    for nodes in ("1", "4", "16"):
        monkeypatch.setenv("NNODES", nodes)
        assert present_config(configs) == configs / f"config-n{nodes}.yaml"


def test_a_job_of_fixed_size_has_one(tmp_path: Path) -> None:
    assert present_config(folder(tmp_path, "config.yaml"), environ={"NNODES": "3"}) == tmp_path / "config.yaml"


@pytest.mark.parametrize(
    ("names", "nodes", "said"),
    [
        (("config.yaml", "config-n2.yaml", "config-n10.yaml"), "3", "config-n3.yaml does not exist; the sizes .* are 2, 10, so add 3"),
        ((), "3", "holds neither config-n3.yaml nor config.yaml; mount the ConfigMap training-config-<job> there"),
        (("config.yaml",), "", "NNODES is ''; start the script with hyperpodrun"),
        (("config.yaml",), "2:8", "NNODES is '2:8'; start the script with hyperpodrun"),
    ],
)  # fmt: skip
def test_a_size_without_one_is_refused(tmp_path: Path, names: tuple[str, ...], nodes: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        present_config(folder(tmp_path, *names), environ={"NNODES": nodes})


def test_a_folder_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="nowhere holds neither"):
        present_config(tmp_path / "nowhere", environ={"NNODES": "1"})
