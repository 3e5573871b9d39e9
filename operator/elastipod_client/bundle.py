"""`elastipod bundle JOB`: one archive with what explains a job, without secrets, to send to somebody who helps."""

from __future__ import annotations

import io
import json
import tarfile
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastipod_operator.kube.reading import Body, mapping, mappings, name_of, text

from .bundling import lines_about, redacted_log, redacted_object, redacted_text, values_of_variables
from .explanation import explain
from .kubectl import Kubectl, KubectlError
from .life import as_json, life_of
from .observing import observe
from .options import OK, UsageError, add_job, kubectl_of, parser_of, run
from .situation import Situation, job_facts

LEADER = "hp-training-control-plane"
LOG_LINES, OPERATOR_LINES = 500, 20_000
MAX_PODS = 32


def parser() -> ArgumentParser:
    """Give the parser of the command."""
    found = parser_of(
        "bundle",
        "Write an archive with the job, its pods, Events, Workloads and log lines, without secrets and values of variables.",
    )
    add_job(found)
    found.add_argument("-f", "--file", type=Path, help="the archive (default: JOB-bundle.tar.gz); it must not exist")
    found.add_argument(
        "--no-logs", action="store_true", help="leave out the pods' logs, which contain the script's output"
    )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives its exit code."""
    args = parser().parse_args(argv)

    def bundle() -> int:
        target = args.file or Path(f"{args.job}-bundle.tar.gz")
        if target.exists():
            raise UsageError(f"{target} exists; remove it, or name another with --file")
        kubectl = kubectl_of(args)
        situation = observe(kubectl, args.job)
        files = contents(situation)
        files |= _logs(kubectl, situation, has_logs=not args.no_logs)
        write(target, args.job, files)
        print(f"{target}: {', '.join(sorted(files))}")
        print(
            "Secrets and values of variables are taken out as far as they can be told. Look through it before you send it."
        )
        return OK

    return run("bundle", bundle)


def contents(situation: Situation) -> dict[str, str]:
    """Give the files about the objects, by name."""
    life = life_of(job_facts(situation.job, situation.now), situation.events, situation.now)
    bodies: dict[str, Any] = {
        "job.json": situation.job, "pods.json": situation.pods, "events.json": situation.events,
        "workloads.json": situation.workloads, "nodes.json": list(situation.nodes.values()),
        "queues.json": [queue for queue in (situation.local_queue, situation.cluster_queue) if queue is not None],
    }  # fmt: skip
    files = {name: _as_text(_redacted(found)) for name, found in bodies.items() if found}
    files["why.txt"] = redacted_text(explain(situation).text) + "\n"
    files["timeline.json"] = redacted_text(_as_text(as_json(life)))
    return files


def _redacted(found: Any) -> Any:
    return redacted_object(found) if isinstance(found, Mapping) else [redacted_object(one) for one in found]


def _as_text(found: Any) -> str:
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def _logs(kubectl: Kubectl, situation: Situation, *, has_logs: bool) -> dict[str, str]:
    """Give the logs, of pods and of the operator, as far as they may be read; what may not is said in unread.txt."""
    values = values_of_variables([situation.job, *situation.pods])
    files: dict[str, str] = {}
    unread = [f"{kind}: {why}" for kind, why in situation.unread.items()]
    pods = situation.pods[:MAX_PODS] if has_logs else []
    for pod in pods:
        try:
            log = kubectl.run("logs", name_of(pod), "--all-containers", "--prefix", f"--tail={LOG_LINES}")
        except KubectlError as error:
            unread.append(f"log of pod {name_of(pod)}: {error}")
        else:
            files[f"logs/{name_of(pod)}.log"] = redacted_log(log, values)
    if has_logs and len(situation.pods) > MAX_PODS:
        unread.append(f"the logs of {len(situation.pods) - MAX_PODS} more pods")
    try:
        facts = job_facts(situation.job, situation.now)
        files["operator.log"] = redacted_log(lines_about(_operator_log(kubectl), facts.name, LOG_LINES), values)
    except KubectlError as error:
        unread.append(f"log of the operator: {error}")
    if unread:
        files["unread.txt"] = "\n".join(unread) + "\n"
    return files


def _operator_log(kubectl: Kubectl) -> str:
    """Give the log of the leading operator. Raises KubectlError."""
    anywhere = Kubectl(context=kubectl.context, kubeconfig=kubectl.kubeconfig)
    leaders = anywhere.items("pods", "--all-namespaces", f"--selector={LEADER}")
    if not leaders:
        raise KubectlError(f"no pod has the label {LEADER}")
    meta: Body = mapping(leaders[0].get("metadata"))
    containers = mappings(mapping(leaders[0].get("spec")).get("containers"))
    within = Kubectl(namespace=text(meta.get("namespace")), context=kubectl.context, kubeconfig=kubectl.kubeconfig)
    first = ["-c", text(containers[0].get("name"))] if containers else []
    return within.run("logs", name_of(leaders[0]), *first, f"--tail={OPERATOR_LINES}")


def write(target: Path, job: str, files: Mapping[str, str]) -> None:
    """Write the archive, in a folder of its own, readable by its owner alone. Raises UsageError if it cannot be written."""
    try:
        with target.open("xb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
            target.chmod(0o600)
            for name, content in sorted(files.items()):
                data = content.encode("utf-8", "replace")
                entry = tarfile.TarInfo(f"{job}-bundle/{name}")
                entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
                archive.addfile(entry, io.BytesIO(data))
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error
