"""Restarts, crashes and idle cost of our agent, side by side with torchrun and the original agent.

python -m bench.agent [--repeat 5] [--sides warm,cold,...] [--parts restarts,idle]. Writes .run/bench/agent.json, and every single
measurement with the reasons of failed runs into .run/bench/agent-runs.json. A choice of sides or
parts, fewer than five runs, or an interrupted run, goes to agent-part.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from bench.common.options import some_of
from bench.common.processes import Failed, Processes
from bench.common.report import conclude, report, report_name, table, write_json
from bench.common.samples import Samples
from bench.common.surroundings import Surroundings
from bench.launchers.idle import IdleSession
from bench.launchers.nodes import Launcher, launchers
from bench.launchers.output import OutputSession
from bench.launchers.rows import COLD, MEMORY, ORIGINAL, TORCHRUN, TUNED, WARM, rows
from bench.launchers.session import Session
from tests.peers import peer_python

RUN = Path(__file__).resolve().parents[1] / ".run" / "bench"
PARTS: dict[str, tuple[type[Session], tuple[str, ...]]] = {
    "restarts": (Session, (MEMORY, WARM, COLD, ORIGINAL, TUNED)),
    "idle": (IdleSession, (WARM, COLD, ORIGINAL, TORCHRUN)),
    "output": (OutputSession, (WARM,)),
}
SIDES = tuple(dict.fromkeys(side for _, sides in PARTS.values() for side in sides))
VERSIONS = """
import importlib.metadata as m, json, platform
names = {d.metadata["Name"] for d in m.distributions()} & {"torch", "numpy", "hyperpod-elastic-agent"}
print(json.dumps({"python": platform.python_version(), **{n: m.version(n) for n in sorted(names)}}))
"""


def main() -> int:
    """Give 0 when every row was measured and reached what it is to reach, 130 when interrupted."""
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    plain, original = peer_python("torch211"), peer_python("original")
    known = launchers(plain, original)
    samples, surroundings = Samples(options.repeat), Surroundings()
    shutil.rmtree(RUN / "agent", ignore_errors=True)
    try:
        for part in options.parts:
            kind, sides = PARTS[part]
            for repetition in range(1, options.repeat + 1):
                for side in [side for side in sides if side in options.sides]:
                    print(f"{part} {repetition}/{options.repeat}: {side}", flush=True)
                    surroundings.await_quiet(options.wait_for_quiet)
                    _run(kind, known[side], RUN / "agent" / f"{part}-{repetition}-{side}", samples)
    except KeyboardInterrupt:
        print("interrupted; all processes are ended", file=sys.stderr)
        _write("agent-part", samples, surroundings, _versions(plain, original))
        return 130
    is_whole = options.parts == list(PARTS) and options.sides == list(SIDES)
    name = report_name("agent", is_whole=is_whole, repeat=options.repeat)
    return _write(name, samples, surroundings, _versions(plain, original))


def _run(kind: type[Session], launcher: Launcher, folder: Path, samples: Samples) -> None:
    """Run one session; whatever it starts is gone afterwards."""
    folder.mkdir(parents=True)
    with Processes() as processes:
        session = kind(launcher, folder, samples)
        try:
            (session.run_torchrun if launcher.name in (TUNED, TORCHRUN) else session.run_agents)(processes)
        except Failed as error:
            print(f"    FAILED: {error}", flush=True)


def _write(name: str, samples: Samples, surroundings: Surroundings, versions: dict[str, str]) -> int:
    drawn = rows(samples, is_part=name != "agent")
    machine = surroundings.describe()
    write_json(
        RUN / f"{name}.json", report(name, drawn, machine=machine, load_1m=surroundings.load_1m, versions=versions)
    )
    write_json(RUN / f"{name}-runs.json", samples.as_json())
    print(f"\n{table(drawn)}\n\n{machine}; load {surroundings.load_1m:.2f}; {RUN / name}.json")
    surroundings.warn()
    return conclude(drawn)


def _versions(plain: Path, original: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for prefix, python in (("", plain), ("original: ", original)):
        done = subprocess.run([str(python), "-c", VERSIONS], capture_output=True, text=True, timeout=60, check=True)
        found |= {prefix + name: version for name, version in json.loads(done.stdout).items()}
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.agent", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="runs of every side (default: 5)")
    parser.add_argument("--sides", type=some_of(SIDES), default=list(SIDES), help=f"some of {','.join(SIDES)}")
    parser.add_argument("--parts", type=some_of(PARTS), default=list(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument(
        "--wait-for-quiet",
        type=float,
        default=30.0,
        help="maximum seconds to wait before each run while other processes use the machine",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
