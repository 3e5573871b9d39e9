"""The agent's own lines."""

from __future__ import annotations

import re

from elastipod_agent.log import EventLog


def test_one_line_per_event_with_job_and_group_rank() -> None:
    lines: list[str] = []
    log = EventLog(lines.append, "ns/job")
    log.info("ready", port=8080, note=None)
    log.group_rank = 3
    log.error("fault", message="two\nlines")
    assert re.fullmatch(r"hyperpodrun: \S+Z INFO ready job=ns/job port=8080", lines[0])
    assert lines[1].endswith('ERROR fault job=ns/job group_rank=3 message="two lines"')
    assert re.search(r"group_rank=(\d+)", lines[1])
