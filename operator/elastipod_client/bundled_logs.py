"""The logs in a bundle: those of pods, and the operator's lines about the job."""

from __future__ import annotations

from dataclasses import replace

from elastipod_operator.kube.reading import name_of

from .bundling import lines_about, redacted_log, values_of_variables
from .kubectl import Kubectl, KubectlError
from .log_reading import IGNORE_ERRORS, without_errors
from .operators import RunningOperator, leaders, watching
from .situation import Situation, job_facts

LEADER = "hp-training-control-plane"
LOG_LINES, OPERATOR_LINES = 500, 20_000
# Of each container: a script may print a whole file as one line.
LOG_BYTES, OPERATOR_BYTES = 4 * 2**20, 64 * 2**20
MAX_PODS = 32


def logs_of(kubectl: Kubectl, situation: Situation, *, has_logs: bool) -> dict[str, str]:
    """Give the files with logs, by name, as far as they may be read; what may not is said in unread.txt. has_logs: of pods too."""
    values = values_of_variables([situation.job, *situation.pods])
    unread = [f"{kind}: {why}" for kind, why in situation.unread.items()]
    files = _of_pods(kubectl, situation, unread) if has_logs else {}
    if (lines := _of_operator(kubectl, situation, unread)) is not None:
        files["operator.log"] = lines
    if unread:
        files["unread.txt"] = "\n".join(unread) + "\n"
    return {name: redacted_log(content, values) for name, content in files.items()}


def _of_pods(kubectl: Kubectl, situation: Situation, unread: list[str]) -> dict[str, str]:
    files: dict[str, str] = {}
    options = ["--all-containers", "--prefix", IGNORE_ERRORS, f"--tail={LOG_LINES}", f"--limit-bytes={LOG_BYTES}"]
    for pod in map(name_of, situation.pods[:MAX_PODS]):
        try:
            log, errors = without_errors(kubectl.run("logs", pod, *options))
        except KubectlError as error:
            log, errors = "", [str(error)]
        unread += [f"log of pod {pod}: {error}" for error in errors]
        if log or not errors:
            files[f"logs/{pod}.log"] = log
    if len(situation.pods) > MAX_PODS:
        unread.append(f"the logs of {len(situation.pods) - MAX_PODS} more pods")
    return files


def _of_operator(kubectl: Kubectl, situation: Situation, unread: list[str]) -> str | None:
    """Give what the operator of the job's namespace logged about the job; None if its log could not be read."""
    job = job_facts(situation.job, situation.now).name
    try:
        operator = _operator_of(kubectl, job.partition("/")[0], unread)
        within = replace(kubectl, namespace=operator.namespace)
        options = ["-c", operator.container, f"--tail={OPERATOR_LINES}", f"--limit-bytes={OPERATOR_BYTES}"]
        return lines_about(within.run("logs", name_of(operator.body), *options), job, LOG_LINES)
    except KubectlError as error:
        unread.append(f"log of the operator: {error}")
        return None


def _operator_of(kubectl: Kubectl, namespace: str, unread: list[str]) -> RunningOperator:
    """Give the leading operator that runs the jobs of a namespace. Raises KubectlError if there is none."""
    anywhere = replace(kubectl, namespace="")
    found = leaders(anywhere.items("pods", "--all-namespaces", f"--selector={LEADER}"))
    if not found:
        raise KubectlError(f"no pod has the label {LEADER}")
    candidates = watching(found, namespace)
    if not candidates:
        names = ", ".join(sorted(one.name for one in found))
        raise KubectlError(f"no operator watches namespace {namespace}: {names} watch others")
    if len(candidates) > 1:
        others = ", ".join(one.name for one in candidates[1:])
        unread.append(f"logs of other operators that watch namespace {namespace}: {others}")
    return candidates[0]
