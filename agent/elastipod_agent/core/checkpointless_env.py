"""Variables of the original's checkpointless training: which the agent takes, and what it says of the others.

Their table is in docs/design/in-process-restart.md. The agent reads two of them (INPROCESS_RESTART, INPROCESS_RESTART_TIMEOUT). The
others are read by that library in every worker. It ends with a traceback where one is no number, so the agent says it before any
worker starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TIMEOUT = "INPROCESS_RESTART_TIMEOUT"
DEFAULT_TIMEOUT_S = 600

_ASKED = "INPROCESS_RESTART"
_PORTS = (1024, 65535)
_FLAG = (0, 1)
# name -> the least and the greatest number that make sense; None for no limit
_NUMBERS: Mapping[str, tuple[int, int | None]] = {
    "HPCT_USE_ROOTLESS": _FLAG,
    "HPCT_PORT_BASE": _PORTS,
    "N_PROC_PER_NODE": (1, None),
    "NCCL_SOCKET_RETRY_DELAY": (0, None),
    "TORCH_DIST_INIT_BARRIER": _FLAG,
    "TORCH_GLOO_GET_PORT_BASE": _PORTS,
    "TORCH_NCCL_GET_PORT_BASE": _PORTS,
}
# What torch, gloo and NCCL as published do not read.
_OF_OTHER_BUILDS = ("HPCT_USE_ROOTLESS", "HPCT_PORT_BASE", "TORCH_GLOO_GET_PORT_BASE", "TORCH_NCCL_GET_PORT_BASE")


class BadVariable(ValueError):
    """A variable with which no worker could train; the sentence names it and what would work."""


def timeout_of(environ: Mapping[str, str], given: int | None) -> int:
    """Give the seconds that workers have to come back: the option's, else the variable's. Raises BadVariable."""
    if given is not None:
        return given
    text = environ.get(TIMEOUT, "").strip()
    if not text:
        return DEFAULT_TIMEOUT_S
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise BadVariable(f"{TIMEOUT} is {text!r}; it must be a number of seconds, as for --inprocess-timeout")
    return int(text)


def check_variables(
    environ: Mapping[str, str], *, nproc: int, is_inprocess: bool, timeout_given: int | None
) -> list[str]:
    """Give the warnings, one sentence each. nproc: workers of this pod. Raises BadVariable."""
    asked = environ.get(_ASKED, "").strip()
    if not is_inprocess:
        if asked in ("", "0"):
            return []
        return [
            f"{_ASKED}={asked} has no effect without --inprocess-restart in the command line: after a fault all workers are new "
            "processes"
        ]
    said = [f"{_ASKED}=0 has no effect beside --inprocess-restart; remove one of them"] if asked == "0" else []
    variable = environ.get(TIMEOUT, "").strip()
    if timeout_given is not None and variable not in ("", str(timeout_given)):
        said.append(f"{TIMEOUT}={variable} has no effect beside --inprocess-timeout={timeout_given}")
    said += _odd_numbers(environ) + _odd_nproc(environ, nproc)
    others = [name for name in _OF_OTHER_BUILDS if environ.get(name, "").strip() not in ("", "0")]
    if others:
        said.append(
            f"{', '.join(others)} {'has' if len(others) == 1 else 'have'} an effect only in the builds of torch, gloo and NCCL that "
            "start groups without a store; any other build uses the store at MASTER_ADDR and MASTER_PORT, which change with each run"
        )
    return said


def _odd_numbers(environ: Mapping[str, str]) -> list[str]:
    """Give a sentence for each number that is out of bounds. Raises BadVariable for what is none."""
    said = []
    for name, (least, most) in _NUMBERS.items():
        text = environ.get(name, "").strip()
        if not text:
            continue
        wanted = f"a number, at least {least}" if most is None else f"a number from {least} to {most}"
        wanted = "0 or 1" if most == 1 else wanted
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise BadVariable(f"{name} is {text!r}; it must be {wanted}")
        if int(text) < least or (most is not None and int(text) > most):
            said.append(f"{name} is {text}; it should be {wanted}")
    return said


def _odd_nproc(environ: Mapping[str, str], nproc: int) -> list[str]:
    """Compare the numbers of workers. Raises BadVariable where workers would get the addresses of other ranks than they mean."""
    text = environ.get("NPROC_PER_NODE", "").strip()
    if re.fullmatch(r"[1-9][0-9]*", text) and int(text) != nproc:
        raise BadVariable(
            f"nprocPerNode of the job is {text} (NPROC_PER_NODE), but --nproc-per-node is {nproc}; with --inprocess-restart they must "
            "be equal, because workers get the addresses of all ranks by it"
        )
    theirs = environ.get("N_PROC_PER_NODE", "").strip()
    if not theirs or int(theirs) == nproc:
        return []
    return [f"N_PROC_PER_NODE is {theirs}, but the pod has {nproc} workers (--nproc-per-node)"]
