"""`elastipod suspend`, `resume` and `scale`: changes of a job that kubectl can make too, with what follows from them."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from elastipod_operator.kube.reading import Body, mapping

from .kubectl import Kubectl
from .observing import JOBS
from .options import ATTENTION, OK, add_job, kubectl_of, parser_of, run
from .situation import job_facts
from .terminal import say


def suspend_parser() -> ArgumentParser:
    """Give the parser of `suspend`."""
    found = parser_of(
        "suspend", "Have the workers of a job save a checkpoint and stop; its pods end and its quota is returned."
    )
    add_job(found)
    return found


def resume_parser() -> ArgumentParser:
    """Give the parser of `resume`."""
    found = parser_of("resume", "Let a suspended job train again, from its newest checkpoint.")
    add_job(found)
    return found


def scale_parser() -> ArgumentParser:
    """Give the parser of `scale`."""
    found = parser_of("scale", "Set the largest size of a job, as kubectl scale does. Its elasticPolicy still holds.")
    add_job(found)
    help_text = "the ceiling; it must not be below the minimum size; 0 removes it"
    found.add_argument("--replicas", type=_count, required=True, metavar="N", help=help_text)
    return found


def suspend(argv: Sequence[str] | None = None) -> int:
    """Run `elastipod suspend`; gives its exit code."""
    args = suspend_parser().parse_args(argv)
    return run("suspend", lambda: _set_suspend(kubectl_of(args), args.job, wanted=True))


def resume(argv: Sequence[str] | None = None) -> int:
    """Run `elastipod resume`; gives its exit code."""
    args = resume_parser().parse_args(argv)
    return run("resume", lambda: _set_suspend(kubectl_of(args), args.job, wanted=False))


def scale(argv: Sequence[str] | None = None) -> int:
    """Run `elastipod scale`; gives its exit code."""
    args = scale_parser().parse_args(argv)
    return run("scale", lambda: _scale(kubectl_of(args), args.job, args.replicas))


def _set_suspend(kubectl: Kubectl, name: str, *, wanted: bool) -> int:
    job = kubectl.get(JOBS, name)
    if (ended := _how_it_ended(job)) is not None:
        say(f"job {name} has ended ({ended}); nothing was changed")
        return ATTENTION
    word = "suspended" if wanted else "resumed"
    if bool(mapping(mapping(job.get("spec")).get("runPolicy")).get("suspend")) is wanted:
        say(f"job {name} is {word} already; nothing was changed")
        return OK
    kubectl.patch(JOBS, name, {"spec": {"runPolicy": {"suspend": wanted}}})
    follows = "its workers save a checkpoint and stop" if wanted else "it trains again when its pods are ready"
    say(f"job {name} is {word}: {follows}; see: elastipod why {name}")
    return OK


def _scale(kubectl: Kubectl, name: str, replicas: int) -> int:
    job = kubectl.get(JOBS, name)
    if (ended := _how_it_ended(job)) is not None:
        say(f"job {name} has ended ({ended}); nothing was changed")
        return ATTENTION
    before = mapping(job.get("spec")).get("replicas") or 0
    kubectl.patch(JOBS, name, change_of(replicas))
    say(f"job {name}: the ceiling was {_ceiling(before)} and is {_ceiling(replicas)}; see: elastipod why {name}")
    return OK


def change_of(replicas: int) -> Mapping[str, Any]:
    """Give the patch that sets the ceiling."""
    return {"spec": {"replicas": replicas}}


def _ceiling(replicas: int) -> str:
    return str(replicas) if replicas else "none"


def _how_it_ended(job: Body) -> str | None:
    facts = job_facts(job, datetime.now(UTC))
    return facts.state.type if facts.state is not None and facts.has_ended else None


def _count(written: str) -> int:
    if not written.isdecimal():
        raise ArgumentTypeError(f"{written!r} is no number of replicas; it must be 0 or more")
    return int(written)
