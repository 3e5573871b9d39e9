"""The images that a release publishes, built here without a container engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.long_runs import LongRun

from elastipod_local import images
from elastipod_local.images import built_stages

MODULES = {
    "operator": ("elastipod_operator.app", "torch"),
    "agent": ("elastipod_agent.main", "elastipod_operator"),
    "training": ("elastipod_agent.main", "kopf"),
}
PROGRAM = """
import importlib, importlib.util, sys
module, absent = sys.argv[1:]
importlib.import_module(module)
assert importlib.util.find_spec(absent) is None, f"the image has {absent}"
"""


@pytest.mark.slow
def test_each_image_can_do_its_part_and_has_nothing_of_the_others(tmp_path: Path) -> None:
    with built_stages(MODULES) as (builder, built):
        assert {name: stage.config.user for name, stage in built.items()} == dict.fromkeys(MODULES, "65532:65532")
        for name, (module, absent) in MODULES.items():
            builder.run_on(built[name], ("python3", "-c", PROGRAM, module, absent), tmp_path, f"trying image {name}")
        wheels = "set -e; [ $(ls /wheels/*.whl | wc -l) = 1 ]; hyperpodrun --help > /dev/null; [ -O /workspace ]"
        as_user = ("setpriv", "--reuid=65532", "--regid=65532", "--clear-groups", "sh", "-c", wheels)
        builder.run_on(built["agent"], as_user, tmp_path, "using image agent as its user")


@pytest.mark.timeout(900)
@pytest.mark.long("images")
def test_a_training_image_takes_extras_and_other_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_run: LongRun
) -> None:
    """As with `--build-arg`. PyTorch is left out, as on the local cluster; these extras do not need it."""
    given = {**images.BUILD_ARGUMENTS, "EXTRAS": "recipes wandb", "PACKAGES": "six"}
    monkeypatch.setattr(images, "BUILD_ARGUMENTS", given)
    with built_stages(["training"]) as (builder, built):
        command = ("python3", "-c", "import elastipod, six, wandb, yaml")
        builder.run_on(built["training"], command, tmp_path, "importing the packages")
    long_run.count(packages=3)
