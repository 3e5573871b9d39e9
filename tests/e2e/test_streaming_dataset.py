"""MosaicML's real StreamingDataset (tests/peers.py), read by the lines of the documentation at several sizes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.e2e.training_run import REPOSITORY
from tests.nonempty import every
from tests.patience import PATIENCE_S
from tests.peers import peer_python
from tests.unit.docs.pages import page

SAMPLES, EPOCHS, GLOBAL_BATCH = 557, 3, 256
STEPS = EPOCHS * -(-SAMPLES // GLOBAL_BATCH)


@pytest.mark.long("variants")
def test_a_step_has_the_same_samples_at_every_size(tmp_path: Path) -> None:
    """So a resize at any step loses and repeats nothing."""
    (block,) = (text for text in page("docs/frameworks-streaming.md").blocks("python") if "samples_per_shard" in text)
    assert f", {GLOBAL_BATCH}, epochs={EPOCHS})" in block
    lines = tmp_path / "lines.py"
    lines.write_text(block.replace("...", "train(batch, rows)"))
    done = subprocess.run(
        [peer_python("streaming"), REPOSITORY / "tests" / "e2e" / "streaming_dataset_reader.py", tmp_path, lines],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "agent")}, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trained = json.loads(done.stdout.splitlines()[-1])
    by_size = [{int(step): sorted(rows) for step, rows in trained[size].items()} for size in ("2", "3", "1")]
    assert every(found == by_size[-1] for found in by_size)
    assert sorted(by_size[-1]) == list(range(1, STEPS + 1))
    for first in range(1, STEPS + 1, STEPS // EPOCHS):
        epoch = [row for step in range(first, first + STEPS // EPOCHS) for row in by_size[-1][step]]
        assert sorted(epoch) == list(range(SAMPLES))
