"""The operator of tests without a kubelet comes back when it has lost its lease, and only then."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.agent_client import until
from tests.api.restarted_operator import MAX_STARTS, RestartedOperator

LOSES_ITS_LEASE = """
import sys, time
print("started", flush=True)
if open(sys.argv[1]).read().count("started") <= int(sys.argv[2]):
    sys.exit("the lease was lost")
{then}
"""


def operator(log: Path, losses: int, then: str) -> RestartedOperator:
    script = LOSES_ITS_LEASE.format(then=then)
    return RestartedOperator([sys.executable, "-c", script, str(log), str(losses)], os.environ, log)


def test_it_is_started_again_when_it_has_lost_its_lease(tmp_path: Path) -> None:
    log = tmp_path / "operator.log"
    with operator(log, losses=2, then="time.sleep(999)") as running:
        until(lambda: log.read_text().count("started") == 3, "a third start")
        assert running.is_alive
    assert not running.is_alive
    assert log.read_text().count("started") == 3


@pytest.mark.parametrize(("losses", "starts"), [(0, 1), (1, 2), (99, MAX_STARTS)])
def test_another_end_is_the_last_one(tmp_path: Path, losses: int, starts: int) -> None:
    log = tmp_path / "operator.log"
    with operator(log, losses, then="sys.exit('a defect')") as running:
        until(lambda: not running.is_alive, "the end")
    assert log.read_text().count("started") == starts
