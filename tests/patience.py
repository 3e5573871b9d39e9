"""How long tests wait for what must come. A limit is there so that a test ends; it says nothing about how fast anything is.

The tests have to pass on two cores that are shared with six other processes, where a step may take twenty times as long as
alone. What must be soon is asserted by its order (before another event), by a count, or in virtual time.
"""

from __future__ import annotations

PATIENCE_S = 240.0  # for one thing to come about; shorter than the time limit of any test
TIER_TIMEOUT_S = {"unit": 300, "sim": 900, "api": 900, "e2e": 900, "chart": 600}  # of a test with its fixtures
TEARDOWN_S = 180.0  # for the fixtures of a test to end, with those of its file and session where it is their last
