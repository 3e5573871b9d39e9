"""Which configuration of a recipe belongs to the present size: the file that a training script reads at each start."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from elastipod.errors import RecipeError

CONFIG_FOLDER = "/config"
FIXED_CONFIG = "config.yaml"
NODES_ENV = "NNODES"


def config_name(nodes: int) -> str:
    """Give the name of the configuration of a size."""
    return f"config-n{nodes}.yaml"


def present_config(folder: str | Path = CONFIG_FOLDER, *, environ: Mapping[str, str] | None = None) -> Path:
    """Give the path of the configuration of the present size: `config-n<NNODES>.yaml`, or `config.yaml` if no size has its own.

    Call it at each start, in any process that hyperpodrun or a pre-train script started: NNODES is the number of pods of the
    present generation. It reads no file. environ: instead of the process's own. Raises RecipeError, which names the sizes that
    have a configuration.
    """
    folder = Path(folder)
    text = (os.environ if environ is None else environ).get(NODES_ENV, "")
    if not re.fullmatch(r"[1-9][0-9]*", text):
        raise RecipeError(
            f"{NODES_ENV} is {text!r}; start the script with hyperpodrun, which sets it to the number of pods"
        )
    own = folder / config_name(int(text))
    if own.is_file():
        return own
    sizes = sorted(
        int(match[1]) for path in _files(folder) if (match := re.fullmatch(r"config-n(\d+)\.yaml", path.name))
    )
    if sizes:
        raise RecipeError(
            f"{own} does not exist; the sizes with a configuration are {', '.join(map(str, sizes))}, so add {text} to "
            "scale_config and render the recipe again, or take it out of the sizes of the job"
        )
    fixed = folder / FIXED_CONFIG
    if fixed.is_file():
        return fixed
    raise RecipeError(
        f"{folder} holds neither {own.name} nor {FIXED_CONFIG}; mount the ConfigMap training-config-<job> there"
    )


def _files(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
