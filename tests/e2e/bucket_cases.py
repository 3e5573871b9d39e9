"""Checkpoints in an S3 server; run by test_checkpoints. packages: the folder that has s3fs, for the ranks alone."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import Any

from tests.e2e.rank_worlds import run_world

from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.bucket_store import BucketStore
from elastipod.checkpoint.manifest import CheckpointId, Manifest
from elastipod.errors import CheckpointError, FencedError


def worlds(folder: Path, options: dict[str, Any], packages: str) -> dict[str, Any]:
    """Train over worlds of several sizes with everything in the bucket."""

    def body(kind: str, first: int) -> Any:
        def on_rank(rank: int) -> list[Any]:
            sys.path.append(packages)
            run = _run(kind, seed=first)
            with CheckpointManager("s3://bucket/jobs/lm", keep=2, keep_every=3, storage_options=options) as checkpoints:
                resume = run.load(checkpoints)
                loaded = run.digest() if resume else ""
                for step in range(first, first + 3):
                    run.train(step, step)
                    run.save_async(checkpoints, step)
                path = checkpoints.wait()
                there = [each.step for each in checkpoints._store.list_complete()]
            return [resume.step if resume else 0, loaded, run.digest(), str(path), there]

        return on_rank

    return {"two": run_world(2, body("ddp", 1)), "three": run_world(3, body("fsdp", 4))}


def fences(folder: Path, options: dict[str, Any], packages: str) -> Any:
    """What happens to a writer at every point at which a newer generation may come between."""
    return run_world(1, lambda rank: _fences(options, packages))[0]


def _fences(options: dict[str, Any], packages: str) -> dict[str, str]:
    sys.path.append(packages)
    said: dict[str, str] = {}

    def store(place: str) -> BucketStore:
        return BucketStore(f"s3://bucket/{place}", options)

    def attempt(name: str, action: Any) -> None:
        try:
            action()
            said[name] = "done"
        except (FencedError, CheckpointError, OSError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    old, new = store("between"), store("between")
    old.claim(1)
    target = CheckpointId(5, 1)
    begun = old.begin(target)
    new.claim(2)
    attempt("claimed while it wrote", lambda: old.commit(begun, Manifest(target, 1, {}, {})))

    old, new = store("late"), store("late")
    old.claim(1)
    begun = old.begin(target)
    old.check_fence = lambda generation: None  # type: ignore[method-assign]  # it looked just before the claim was there
    new.claim(2)
    attempt("claimed after its last look", lambda: old.commit(begun, Manifest(target, 1, {}, {})))
    said["what is there then"] = str(new.list_complete())

    late = store("late")
    attempt("begins late", lambda: late.begin(CheckpointId(6, 1)))
    new.prune(2, keep=1)
    said["what is left"] = str(sorted(new._names("")))

    first = store("twice")
    first.claim(1)
    begun = first.begin(target)
    manifest = Manifest(target, 1, {}, {"by": 1})
    first.commit(begun, manifest)
    attempt("its own commit repeated", lambda: first.commit(begun, manifest))
    attempt("another commit", lambda: first.commit(begun, Manifest(target, 1, {}, {"by": 2})))
    attempt("foreign", lambda: store(f"twice/{target.name}").claim(1))
    return said


def trouble(folder: Path, options: dict[str, Any], packages: str) -> Any:
    """Damage, and a server that refuses: what is said, and that nobody's keys are in it. folder: of the server."""
    return run_world(1, lambda rank: _trouble(folder, options, packages))[0]


def _trouble(folder: Path, options: dict[str, Any], packages: str) -> dict[str, Any]:
    sys.path.append(packages)
    heard = io.StringIO()
    logging.basicConfig(stream=heard, level=logging.DEBUG, force=True)
    logging.getLogger("botocore").setLevel(logging.WARNING)
    run = _run("plain", seed=0)
    with CheckpointManager("s3://bucket/trouble", storage_options=options) as checkpoints:
        run.train(1, 1)
        run.save(checkpoints, 1)
        run.train(2, 2)
        run.save(checkpoints, 2)
    newest = folder / "data" / "bucket" / "trouble" / CheckpointId(2, 1).name / "__0_0.distcp"
    content = bytearray(newest.read_bytes())
    content[600:900] = bytes(each ^ 1 for each in content[600:900])  # the first tensor's numbers lie there
    newest.write_bytes(content)
    with CheckpointManager("s3://bucket/trouble", storage_options=options) as checkpoints:
        resume = run.load(checkpoints)
    wrong = {**options, "secret": "another-secret-that-is-wrong"}
    refused: list[str] = []
    for address, how in (("s3://bucket/trouble", wrong), ("s3://someone:password@bucket/trouble", options)):
        try:
            refused.append(f"generation {CheckpointManager(address, storage_options=how).claim()}")
        except CheckpointError as error:
            refused.append(str(error))
    return {"resumed": resume and resume.step, "refused": refused, "heard": heard.getvalue()}


def _run(kind: str, seed: int) -> Any:
    from tests.e2e.checkpoint_run import Run

    return Run(kind, seed=seed)
