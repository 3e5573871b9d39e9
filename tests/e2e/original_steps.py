"""The requests that both agents get, as data; a step is one call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.e2e.original_agents import MASTER_PORT, ControlledAgent, Reply

START: dict[str, Any] = {
    "rank": 0,
    "nnodes": 1,
    "faultCount": 0,
    "master_addr": "127.0.0.1",
    "master_port": MASTER_PORT,
    "log_monitoring_configuration": None,
    "ipVersion": None,
    "rankIps": None,
    "worker_data": None,
    "spare": False,
    "progress": {},
}
UPDATE = {name: value for name, value in START.items() if name != "progress"}
RULE = {"name": "loss", "logPattern": "loss=([0-9.]+)", "expectedStartCutOffInSeconds": 600}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
CHECKPOINT = {"a": {"progressData": "/data/a", "progressCount": 7}}


@dataclass(frozen=True, slots=True)
class Step:
    """One call.

    lanes: names of the only lanes that make it, all when empty. times: so many at the same moment. mode: of workers, if not the lane's.
    """

    name: str
    method: str
    path: str
    body: object = None
    raw: bytes | None = None
    headers: Mapping[str, str] | None = None
    lanes: frozenset[str] = frozenset()
    times: int = 1
    mode: str | None = None

    def send(self, agent: ControlledAgent) -> Reply:
        """Make the call, once."""
        return agent.call(self.method, self.path, self.body, raw=self.raw, headers=self.headers)


ANYWHERE: frozenset[str] = frozenset()
# Where every spelling of a call's body is tried: there it means something. Elsewhere the plain ones are.
SPELT_OUT = {"/start": frozenset({"ready again"}), "/update": frozenset({"running"}), "/stop": frozenset({"running"})}


# -- calls -----------------------------------------------------------------------------------------------------------


def _calls_without_meaning() -> list[Step]:
    """Paths, methods and queries that nobody should need."""
    steps = [
        Step(f"{method} {path}", method, path)
        for method, path in (
            ("GET", "/status"),
            ("GET", "/status?after=1000000&wait=0"),
            ("GET", "/status?unknown=1"),
            ("HEAD", "/status"),
            ("POST", "/status"),
            ("GET", "/start"),
            ("PUT", "/start"),
            ("GET", "/stop"),
            ("DELETE", "/stop"),
            ("GET", "/update"),
            ("PATCH", "/update"),
            ("GET", "/shutdown"),
            ("GET", "/"),
            ("GET", "/nothing"),
            ("POST", "/nothing"),
            ("GET", "/STATUS"),
            ("GET", "/status/"),
            ("OPTIONS", "/status"),
        )
    ]
    return [*steps, Step("GET /status with a body", "GET", "/status", {"a": 1})]


def _bad_bodies(path: str) -> list[Step]:
    """Bodies that are no JSON, no object, or in another shape than they say."""
    plain = json.dumps(START).encode()
    raws: dict[str, bytes] = {
        "not JSON": b"rank=0",
        "half an object": b'{"rank": 0,',
        "an array": b"[]",
        "a number": b"7",
        "a string": b'"stop"',
        "no UTF-8": b'{"rank": "\xff"}',
        "NaN": b'{"rank": NaN, "timeout": NaN}',
        "deeply nested": b"[" * 50_000 + b"]" * 50_000,
    }
    steps = [Step(f"{path}: {name}", "POST", path, raw=raw) for name, raw in raws.items()]
    if path != "/stop":
        steps += [
            Step(f"{path}: no body", "POST", path),
            Step(f"{path}: null", "POST", path, raw=b"null"),
            Step(f"{path}: an empty object", "POST", path, {}),
            Step(f"{path}: white space", "POST", path, raw=b"  \n"),
        ]
    if path == "/update":
        steps += [
            Step(f"{path}: {name}", "POST", path, raw=raw, headers=headers, lanes=SPELT_OUT[path])
            for name, raw, headers in (
                ("JSON as a form", plain, FORM),
                ("JSON without a content type", plain, {}),
                ("JSON as text", plain, {"Content-Type": "text/plain"}),
                ("JSON with a charset", plain, {"Content-Type": "application/json; charset=utf-8"}),
                ("JSON of some kind", plain, {"Content-Type": "application/merge-patch+json"}),
                ("UTF-16", json.dumps(START).encode("utf-16"), None),
                ("a byte order mark", b"\xef\xbb\xbf" + plain, None),
                ("a field twice", plain[:-1] + b', "rank": "x"}', None),
            )
        ]
    return steps


# Field -> values that a sloppy client could send.
SPELLINGS: dict[str, tuple[object, ...]] = {
    "rank": ("0", " 0 ", 0.0, 0.5, True, None, "x", [], -1, 1, 2**70, "", "0.0", "1_0", "+0"),
    "nnodes": ("1", 1.0, 0, -1, None, "x", True, 2, 100_000),
    "faultCount": ("3", 3, 3.0, -1, None, "x", 2**40, True),
    "master_addr": ("", None, 5, "host-1.example", "::1", " ", True, "a" * 300),
    "master_port": (str(MASTER_PORT), float(MASTER_PORT), 0, -1, 70_000, "x", "", None, True, 1.5),
    "log_monitoring_configuration": ([], [RULE], [{}], [{"name": "x"}], ["x"], {}, "x", [{**RULE, "logPattern": "("}]),
    "ipVersion": ("1", "", 1, [], True),
    "rankIps": (
        [],
        [{"ip": "10.0.0.1", "rank": 0}],
        [{"ip": None}],
        [{"ip": 1.5}],
        [{"ip": True}],
        ["x"],
        {},
        "x",
        [[]],
    ),
    "worker_data": ({}, {"a": [1]}, [], "x", 1, False, 0, ""),
    "spare": (True, 1, 0, 2, "true", "True", "no", "x", None, 1.0, 1.5, [], -1),
    "progress": (CHECKPOINT, None, [], "x", {"a": 1}),
    "unknown": ("anything",),
}
# What a start makes of them; each costs a run, and the rest a start reads as an update does.
START_SPELLINGS: dict[str, tuple[object, ...]] = {
    "rank": ("0", 1, -1, True),
    "nnodes": ("1", 2, 0),
    "faultCount": ("3", 3, -1),
    "master_addr": ("host-1.example", ""),
    "master_port": (str(MASTER_PORT), 70_000, "x"),
    "log_monitoring_configuration": ([], [RULE], [{}], [{**RULE, "logPattern": "("}]),
    "rankIps": ([{"ip": "10.0.0.1", "rank": 0}],),
    "worker_data": ({"a": [1]},),
    "spare": (1, "true", None),
    "progress": (CHECKPOINT, None, [], {"a": 1}),
    "generation": (1_000_000,),  # ours; an operator sends it only to agents whose /status shows it
    "unknown": ("anything",),
}
STOP_BODIES: dict[str, object] = {
    "an empty object": {},
    "in_process_restart": {"restart_mode": "in_process_restart"},
    "another mode": {"restart_mode": "xyz"},
    "mode 5": {"restart_mode": 5},
    "mode null": {"restart_mode": None},
    "graceful": {"is_graceful": True, "timeout": 1},
    "graceful without a time": {"is_graceful": True},
    "graceful null": {"is_graceful": None, "timeout": None},
    "graceful 'yes'": {"is_graceful": "yes", "timeout": "1"},
    "graceful 'x'": {"is_graceful": "x"},
    "graceful 1": {"is_graceful": 1, "timeout": 1.0},
    "graceful 2": {"is_graceful": 2},
    "graceful []": {"is_graceful": []},
    "time 'x'": {"timeout": "x"},
    "time 1.5": {"timeout": 1.5},
    "time -1": {"timeout": -1},
    "time true": {"timeout": True},
    "time for ever": {"timeout": 10**12},
    "unknown field": {"unknown": 1},
}
STOP_PLAIN = frozenset({"an empty object", "graceful", "another mode"})


def _spellings(path: str, base: Mapping[str, Any]) -> list[Step]:
    steps = [Step(f"{path}: plain", "POST", path, dict(base))]
    for name in base if path == "/update" else ():
        body = {key: value for key, value in base.items() if key != name}
        steps.append(Step(f"{path}: without {name}", "POST", path, body, lanes=SPELT_OUT[path]))
    for name, values in (START_SPELLINGS if path == "/start" else SPELLINGS).items():
        for value in values:
            body = {**base, name: value}
            shown = repr(value) if len(repr(value)) < 150 else f"{str(value)[:20]}..."
            steps.append(Step(f"{path}: {name} {shown}", "POST", path, body, lanes=SPELT_OUT[path]))
    return steps


def _stops() -> list[Step]:
    steps = [Step("/stop: no body", "POST", "/stop"), Step("/stop: null", "POST", "/stop", raw=b"null")]
    for name, body in STOP_BODIES.items():
        lanes = ANYWHERE if name in STOP_PLAIN else SPELT_OUT["/stop"]
        steps.append(Step(f"/stop: {name}", "POST", "/stop", body, lanes=lanes))
    deaf = Step("/stop: graceful, and SIGUSR1 is not handled", "POST", "/stop", {"is_graceful": True, "timeout": 1})
    return [*steps, replace(deaf, lanes=frozenset({"running"}), mode="sleeps")]


def _at_once() -> list[Step]:
    return [
        Step("/start: 8 at once", "POST", "/start", START, times=8),
        Step("/stop: 8 at once", "POST", "/stop", times=8),
        Step("/status: 16 at once", "GET", "/status", times=16),
    ]


def _all_steps() -> tuple[Step, ...]:
    bad = [step for path in ("/start", "/stop", "/update") for step in _bad_bodies(path)]
    started = [
        Step("/start: as a spare", "POST", "/start", {**START, "spare": True}),
        Step("/start: another fault count", "POST", "/start", {**START, "faultCount": 5, "rank": 1, "nnodes": 3}),
        Step("/update: another rank", "POST", "/update", {**UPDATE, "rank": 1, "nnodes": 3, "ipVersion": "2"}),
        Step("/shutdown", "POST", "/shutdown"),  # the last: nothing comes after it
    ]
    return (
        *_calls_without_meaning(),
        *bad,
        *_spellings("/update", UPDATE),
        *_stops(),
        *_spellings("/start", START),
        *_at_once(),
        *started,
    )


STEPS = _all_steps()
assert len({step.name for step in STEPS}) == len(STEPS), "names of steps are keys"
