"""What a forked worker still has to import: each pause pays for it once more in every worker, the fork server only once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.e2e.warm_start_run import run_warm

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = """
import sys
from elastipod import json_records

known, built = set(sys.modules), json_records._record_codec.cache_info().misses
path = sys.argv[1]
folder, _, name = path.rpartition("/")
sys.path.insert(0, folder)
sys.argv = sys.argv[1:]
with open(path) as file:
    program = compile(file.read(), path, "exec")
exec(program, {"__name__": "__main__", "__file__": path})
new = (name for name in set(sys.modules) - known)
print("imported:", *sorted(name for name in new if not (getattr(sys.modules[name], "__file__", None) or "").startswith(folder)))
print("built:", json_records._record_codec.cache_info().misses - built)
"""


@pytest.mark.parametrize("name", ["train.py", "train_with_checkpoints.py"])
def test_the_first_steps_and_checkpoints_of_a_warm_worker_import_nothing_of_torch_python_or_ours(
    name: str, tmp_path: Path
) -> None:
    """Two generations: one trains and saves, the next one loads."""
    (tmp_path / "wrapper.py").write_text(SCRIPT, "utf-8")
    (tmp_path / "memory").mkdir()
    arguments = [
        *("wrapper.py", str(EXAMPLES / "lm" / name), f"--checkpoint-dir={tmp_path}/checkpoints"),
        *(f"--sample-log-dir={tmp_path}/samples", "--corpus-kib=64", "--layers=1", "--dim=24", "--checkpoint-every=2"),
    ]
    with run_warm(tmp_path, *arguments, "--steps=4", ELASTIPOD_MEMORY_DIR=f"{tmp_path}/memory") as run:
        run.until_warm()
        for generation in (1, 2):
            assert run.generation(generation)["status"] == "completed", run.agent.printed()
        assert run.starts() == (2, 0)
        said = "\n".join(run.lines())
        assert re.findall(r"imported:(.*)", said) == ["", ""]
        assert re.findall(r"built: (.*)", said) == ["0", "0"], "codecs of records, which are built at import"
