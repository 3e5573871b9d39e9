"""A sample log of a rank whose samples another one logs: it has no file, and can be passed to a save like any other."""

from __future__ import annotations

from pathlib import Path

from elastipod.audit.sample_log import SampleLog
from elastipod.data import ElasticBatches


def test_a_log_that_does_not_write_leaves_no_file(tmp_path: Path) -> None:
    plan = ElasticBatches(4, 2)
    names = {}
    for writes in (False, True):
        folder = tmp_path / str(writes)
        with SampleLog(folder, plan, generation=1, rank=0, world_size=1, writes=writes) as log:
            for batch in plan.iterate(0, 1):
                log.step(batch, 0.5)
            log.saved(2)
            log.loaded(0)
            log.end(2, "completed")
        names[writes] = [path.name for path in folder.glob("*")]
    assert names == {False: [], True: ["gen-000001-rank-00000.jsonl"]}
