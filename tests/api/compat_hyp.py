"""Runs in the environment of peer hyp: SageMaker HyperPod's own SDK and command line against our jobs.

Reads lines of JSON from stdin and answers each with one on stdout: {"list": namespace} gives the state of each job as the
SDK reads it, {"run": arguments} what `hyp` printed. Everything that it says beside that goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")
answers = sys.stdout
sys.stdout = sys.stderr

from click.testing import CliRunner  # noqa: E402  # what these import prints
from sagemaker.hyperpod.cli.hyp_cli import cli  # noqa: E402
from sagemaker.hyperpod.training import HyperPodPytorchJob  # noqa: E402


def state(job: Any) -> str:
    """Give the state as `hyp list` shows it: the last condition that is true."""
    conditions = job.status.conditions if job.status else None
    return next((c.type for c in reversed(conditions or []) if c.status == "True"), "Unknown")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Carry one request out."""
    if "list" in request:
        jobs = HyperPodPytorchJob.list(request["list"])
        return {"states": {job.metadata.name: state(job) for job in jobs}}
    done = CliRunner().invoke(cli, request["run"])
    return {"code": done.exit_code, "output": done.output, "error": repr(done.exception or "")}


def main() -> None:
    """Answer until stdin ends."""
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                said = answer(json.loads(line))
        except Exception as error:  # the caller judges
            said = {"problem": f"{type(error).__name__}: {error}"[:3000]}
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
