"""`elastipod import FILE`: prints the HyperPodPyTorchJobs of Kubeflow's jobs, and says what it could not convert."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastipod_operator.kube.reading import mapping, name_of, text

from .foreign_fields import UnknownJobError
from .foreign_jobs import convert
from .options import ATTENTION, INSTALL_EXTRA, OK, UsageError, add_output, run
from .terminal import say
from .training_runtimes import RUNTIMES


def parser() -> argparse.ArgumentParser:
    """Give the parser of `import`."""
    found = argparse.ArgumentParser(
        prog="elastipod import",
        description="Print the HyperPodPyTorchJob of each Kubeflow PyTorchJob and TrainJob in a file. Standard error has a "
        "line for each field that could not be converted. Needs no cluster.",
        epilog="exit codes: 0 everything was converted; 1 something was not; 2 wrong usage, or no such job in the file",
    )
    found.add_argument(
        "file", metavar="FILE", help="manifests in YAML or JSON, also with training runtimes; - reads standard input"
    )
    add_output(found, ("yaml", "json"))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run `elastipod import`; gives its exit code."""
    args = parser().parse_args(argv)
    return run("import", lambda: _import(args.file, args.output))


def _import(file: str, form: str) -> int:
    bodies = _read(file)
    runtimes = [body for body in bodies if text(body.get("kind")) in RUNTIMES]
    jobs = [body for body in bodies if text(body.get("kind")) not in RUNTIMES]
    if not jobs:
        raise UsageError(f"{file}: it holds no job; a PyTorchJob or a TrainJob is needed")
    try:
        made = [convert(body, runtimes) for body in jobs]
    except UnknownJobError as error:
        raise UsageError(f"{file}: {error}") from error
    print(_written([job for job, _ in made], form))
    lost = [f"{name_of(job) or 'a job without a name'}: {sentence}" for job, some in made for sentence in some]
    for line in lost:
        say(f"elastipod import: not converted: {line}", sys.stderr)
    return ATTENTION if lost else OK


def _read(file: str) -> list[dict[str, Any]]:
    """Give the objects of a file, those of lists one by one. Raises UsageError."""
    yaml = _yaml()
    try:
        content = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        documents = [body for body in yaml.safe_load_all(content) if body is not None]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    bodies = [item for body in documents for item in (mapping(body).get("items") or [body])]
    if not all(isinstance(body, dict) for body in bodies):
        raise UsageError(f"{file}: it holds something that is no object of Kubernetes")
    return bodies


def _written(jobs: Sequence[dict[str, Any]], form: str) -> str:
    if form == "json":
        return json.dumps(
            jobs[0] if len(jobs) == 1 else {"apiVersion": "v1", "kind": "List", "items": list(jobs)}, indent=2
        )
    yaml = _yaml()
    return str(yaml.safe_dump_all(jobs, sort_keys=False, allow_unicode=True, width=120)).rstrip()


def _yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise UsageError(f"manifests need the package yaml; {INSTALL_EXTRA}") from error
    return yaml
