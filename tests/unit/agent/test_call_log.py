"""What the control server logs: enough to see a stranger, never a flood, nothing that steers a terminal."""

from __future__ import annotations

import pytest

from elastipod_agent.log import EventLog
from elastipod_agent.metrics import Metrics
from elastipod_agent.server.call_log import BURST, PERIOD_S, CallLog
from elastipod_agent.server.http import Request
from elastipod_agent.server.http_messages import Response


class Lines(list[str]):
    """What was said; `calls` logs at a level, by a clock that the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.metrics = Metrics()

    def calls(self, level: str) -> CallLog:
        return CallLog(EventLog(self.append, "team/job"), level, self.metrics, lambda: self.now)


@pytest.fixture
def lines() -> Lines:
    """Nothing said yet."""
    return Lines()


def test_a_flood_of_refusals_is_counted_and_not_shown(lines: Lines) -> None:
    calls = lines.calls("info")
    for _ in range(1000):
        calls.refused(401, "no token")
    assert len(lines) == BURST
    lines.now += PERIOD_S
    calls.refused(401, "no token")
    assert len(lines) == BURST + 2
    assert f"hidden={1000 - BURST}" in lines[-2]
    assert lines.metrics.value("refused_calls_total", code="401") == 1001


@pytest.mark.parametrize(
    ("level", "status", "is_shown"),
    [("info", 200, False), ("info", 409, False), ("info", 422, True), ("warning", 422, False), ("debug", 200, True)],
)
def test_which_calls_are_shown(lines: Lines, level: str, status: int, is_shown: bool) -> None:
    lines.calls(level).answered(Request("GET", "/status", {}), Response(status))
    assert bool(lines) is is_shown
    assert lines.metrics.value("calls_total", code=str(status)) == 1


def test_a_clients_text_is_shown_short_and_printable_and_its_query_and_body_are_not(lines: Lines) -> None:
    request = Request("GET", "/\x1b[31m\n" + "x" * 5000, {"token": "secret"}, b"secret")
    lines.calls("debug").answered(request, Response(404, {"detail": f"there is no {request.path}"}))
    (line,) = lines
    assert line.isprintable()
    assert len(line) < 700
    assert "secret" not in line


def test_what_a_call_and_a_refusal_say(lines: Lines) -> None:
    calls = lines.calls("debug")
    calls.answered(Request("GET", "/a b", {}), Response(404, {"detail": "there\tis none"}))
    calls.answered(Request("POST", "/stop", {}), Response(200))
    calls.refused(401, "no\x1btoken")
    assert [line.partition(" INFO ")[2] for line in lines] == [
        'call job=team/job method=GET path="/a b" status=404 detail="there?is none"',
        "call job=team/job method=POST path=/stop status=200",
        "call refused job=team/job status=401 why=no?token",
    ]


def test_refusals_are_hidden_for_a_whole_period_and_then_counted_anew(lines: Lines) -> None:
    calls = lines.calls("info")
    for _ in range(BURST + 3):
        calls.answered(Request("GET", "/x", {}), Response(404))
    lines.now += PERIOD_S - 0.001
    calls.refused(401, "no token")
    assert len(lines) == BURST
    lines.now += 0.001
    calls.refused(401, "no token")
    assert len(lines) == BURST + 2
    assert lines[-2].endswith("INFO more calls were refused than are shown job=team/job hidden=4")
    lines.now += PERIOD_S
    calls.refused(401, "no token")
    assert len(lines) == BURST + 3, "none was hidden meanwhile"
