"""The whole path of an event: operator, kubelets and Kueue on the local cluster, beside a Job of Kubernetes in the same queue.

python -m bench.cluster [--repeat 5] [--sides memory,process,batch/Job]. Writes .run/bench/cluster.json, and every single measurement
with the reasons of failed runs into cluster-runs.json; a choice of sides, fewer than five jobs of each or an interrupted run goes to
cluster-part.json. Needs root, as the local cluster does.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bench.common.processes import Failed
from bench.common.report import conclude, report, report_name, table, write_json
from bench.common.samples import Samples
from bench.common.surroundings import Surroundings
from bench.whole_path.rows import rows
from bench.whole_path.sides import (
    BATCH_JOB,
    CRASH,
    EARLY_CRASH,
    GROW,
    MEMORY,
    NODE_LOSS,
    PROCESS,
    SHRINK,
    BatchJob,
    ElasticJob,
    TooLate,
)

from elastipod_local import versions
from elastipod_local.cluster import Cluster
from elastipod_local.errors import LocalClusterError
from elastipod_local.kueue_config import KueueOptions
from elastipod_local.state import NodeOptions

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / ".run" / "bench"
SIDES = [MEMORY, PROCESS, BATCH_JOB]
START = "start 4"


def main() -> int:
    """Give 0 when every row was measured and reached what it is to reach, 1 otherwise."""
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    samples, surroundings = Samples(options.repeat), Surroundings()
    surroundings.await_quiet(options.wait_for_quiet)  # the cluster itself makes the machine busy afterwards
    is_interrupted = False
    try:
        with Cluster.up("bench", nodes=4, options=NodeOptions(cpus=1), kueue=KueueOptions(), progress=print) as cluster:
            _install(cluster)
            for number in range(1, options.repeat + 1):
                for side in options.sides:
                    print(f"cluster {number}/{options.repeat}: {side}", flush=True)
                    _play(cluster, side, number, samples)
    except KeyboardInterrupt:
        print("interrupted; the cluster is taken down", file=sys.stderr)
        is_interrupted = True
    is_whole = options.sides == SIDES and not is_interrupted
    name = report_name("cluster", is_whole=is_whole, repeat=options.repeat)
    drawn = rows(samples, options.sides)
    machine = f"{surroundings.describe()}; shared by control plane, 4 nodes, operator and workers"
    known = {"kubernetes": versions.KUBERNETES_VERSION, "kueue": versions.KUEUE_VERSION}
    write_json(
        RUN / f"{name}.json", report("cluster", drawn, machine=machine, load_1m=surroundings.load_1m, versions=known)
    )
    write_json(RUN / f"{name}-runs.json", samples.as_json())
    print(f"\n{table(drawn)}\n\n{machine}; load {surroundings.load_1m:.2f}; {RUN / name}.json")
    surroundings.warn()
    return conclude(drawn) or int(is_interrupted)


def _install(cluster: Cluster) -> None:
    chart = (
        "install",
        "elastipod",
        str(ROOT / "charts" / "elastipod"),
        "--namespace",
        "aws-hyperpod",
        "--create-namespace",
    )
    cluster.helm(*chart, "--set", "image.tag=dev", "--wait", "--timeout", "120s")
    for name in ("storage.yaml", "lm/queue.yaml"):
        cluster.kubectl("apply", "-f", str(ROOT / "examples" / name))
    cluster.kubectl("wait", "--for=jsonpath={.status.phase}=Bound", "pvc/training-data", "--timeout=60s")


def _play(cluster: Cluster, side: str, number: int, samples: Samples) -> None:
    """Let one job live through all events; after one that failed the rest of its life is given up, unless it did not happen."""

    def add(metric: str, value: float) -> None:
        samples.add(side, metric, value)
        print(f"    {metric}: {value:.3f}", flush=True)

    name = f"path-{side.replace('/', '-').lower()}-{number}"
    job = BatchJob(cluster, name, add) if side == BATCH_JOB else ElasticJob(cluster, side, name, add)
    events: dict[str, Callable[[], None]] = {
        START: job.start,
        SHRINK: lambda: job.resize(SHRINK, 2),
        GROW: lambda: job.resize(GROW, 4),
        CRASH: job.crash,
        EARLY_CRASH: job.crash_early,
    }
    if isinstance(job, ElasticJob):
        events[NODE_LOSS] = job.lose_node
    for event, happen in events.items():
        try:
            happen()
        except (Failed, AssertionError, OSError, LocalClusterError) as error:  # the tests' helpers assert
            samples.fail(side, event, str(error))
            print(f"    FAILED, {event}: {error}", flush=True)
            if not isinstance(error, TooLate):
                break
    with suppress(
        Failed, LocalClusterError
    ):  # the next job waits in the queue until this one is gone, and then fails itself
        job.end()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="jobs of every side (default: 5)")
    parser.add_argument("--sides", type=_sides, default=SIDES, help=f"some of {','.join(SIDES)}")
    parser.add_argument(
        "--wait-for-quiet", type=float, default=30.0, help="maximum seconds to wait before the cluster starts"
    )
    return parser.parse_args()


def _sides(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(SIDES):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(SIDES)}")
    return [one for one in SIDES if one in chosen]


if __name__ == "__main__":
    sys.exit(main())
