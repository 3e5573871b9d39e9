"""`elastipod bundle JOB`: one archive with what explains a job, to send to somebody who helps."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from elastipod_operator.kube.reading import Body

from .bundled_logs import logs_of
from .bundling import redacted_log, redacted_object, values_of_variables
from .explanation import explain
from .life import as_json, life_of
from .observing import observe
from .options import OK, UsageError, add_job, kubectl_of, parser_of, run
from .situation import Situation, job_facts
from .terminal import say


def parser() -> ArgumentParser:
    """Give the parser of the command."""
    found = parser_of(
        "bundle",
        "Write an archive with the job, its pods, Events, Workloads and log lines. Values of variables, and what looks like a "
        "secret, are taken out.",
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
        check_absent(target)
        kubectl = kubectl_of(args)
        situation = observe(kubectl, args.job)
        files = contents(situation) | logs_of(kubectl, situation, has_logs=not args.no_logs)
        write(target, args.job, files)
        say(f"{target}: {', '.join(sorted(files))}")
        say(
            "What can be told to be a secret is taken out, and values of variables. Look through it before you send it."
        )
        return OK

    return run("bundle", bundle)


def contents(situation: Situation) -> dict[str, str]:
    """Give the files about the objects, by name."""
    values = values_of_variables([situation.job, *situation.pods])
    life = life_of(job_facts(situation.job, situation.now), situation.events, situation.now)
    bodies: dict[str, Sequence[Body]] = {
        "pods.json": situation.pods, "events.json": situation.events, "workloads.json": situation.workloads,
        "nodes.json": list(situation.nodes.values()),
        "queues.json": [queue for queue in (situation.local_queue, situation.cluster_queue) if queue is not None],
    }  # fmt: skip
    files = {name: _as_text([redacted_object(one, values) for one in found]) for name, found in bodies.items() if found}
    files["job.json"] = _as_text(redacted_object(situation.job, values))
    files["why.txt"] = redacted_log(explain(situation).text, values) + "\n"
    files["timeline.json"] = _as_text(redacted_object(as_json(life), values))
    return files


def _as_text(found: Any) -> str:
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def check_absent(target: Path) -> None:
    """Raise UsageError if there is a file at the place of the archive, or if that cannot be told."""
    try:
        target.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error
    raise UsageError(f"{target} exists; remove it, or name another with --file")


def write(target: Path, job: str, files: Mapping[str, str]) -> None:
    """Write the archive, in a folder of its own, readable by its owner alone. Raises UsageError if it cannot be written.

    What is not written to its end is removed: it would stand in the way of the next call.
    """
    try:
        with open(target, "xb", opener=_for_owner) as raw:
            try:
                _pack(raw, job, files)
            except BaseException:
                target.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _pack(raw: IO[bytes], job: str, files: Mapping[str, str]) -> None:
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, content in sorted(files.items()):
            data = content.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"{job}-bundle/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(data))
