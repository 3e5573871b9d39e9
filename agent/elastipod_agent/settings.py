"""The agent's settings, read once from the command line and the environment."""

from __future__ import annotations

import argparse
import errno
import os
import re
import shlex
import signal
import string
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from elastipod_agent.arguments import BadUsage as BadUsage
from elastipod_agent.arguments import CommandLine, variable
from elastipod_agent.core.checkpointless_env import BadVariable, check_variables, timeout_of
from elastipod_agent.core.nccl_env import nccl_warnings
from elastipod_agent.core.numa import NoBinding, cpus_for
from elastipod_agent.core.worker_env import Layout
from elastipod_agent.devices import BadWorkerCount, own_devices, resolve_nproc
from elastipod_agent.log_settings import LogSettings, read_log_settings
from elastipod_agent.options import TORCHRUN_OPTIONS
from elastipod_agent.topology import read_topology
from elastipod_agent.waiting import in_thread

DEFAULT_PORT = 8080
_RUN_PATH = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True, slots=True)
class Script:
    """A pre- or post-train script with its arguments."""

    path: str
    args: tuple[str, ...]

    def command(self) -> list[str]:
        """Give the command that runs the script: Python for .py, the file itself if it is executable, else the shell.

        Raises OSError. May block.
        """
        if not os.path.isfile(self.path):
            number = errno.EISDIR if os.path.isdir(self.path) else errno.ENOENT
            raise OSError(number, os.strerror(number), self.path)
        if os.access(self.path, os.X_OK) and not self.path.endswith(".py"):
            return [os.path.abspath(self.path), *self.args]
        interpreter = sys.executable if self.path.endswith(".py") else "/bin/sh"
        return [interpreter, self.path, *self.args]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the agent; they do not change while it lives."""

    host: str
    port: int
    server_log_level: str
    shutdown_signal: int
    shutdown_timeout_s: float
    server_shutdown_timeout_s: float
    layout: Layout
    command: tuple[str, ...]
    is_python: bool  # the command is an interpreter with a script or module
    script_file: str | None  # checked before every start; None if there is no file to check
    pre_script: Script | None
    post_script: Script | None
    logs: LogSettings
    job: str
    is_warm: bool = True
    preload: tuple[str, ...] = ()
    is_inprocess: bool = False
    inprocess_timeout_s: float = 600.0
    hang_timeout_s: float | None = None  # None: derived from the steps; 0: not monitored
    metrics_port: int = 0  # 0: none
    cpus: tuple[frozenset[int], ...] = ()  # CPUs of each worker by local rank; empty: not bound

    def worker_command(self, local_rank: int) -> list[str]:
        """Give one worker's command; ``${local_rank}`` in an argument is replaced, as in torchrun."""
        return [string.Template(part).safe_substitute(local_rank=local_rank) for part in self.command]


def read_settings(command_line: CommandLine, environ: Mapping[str, str]) -> tuple[Settings, list[str]]:
    """Give the settings and warnings, one sentence each. Raises BadUsage."""
    values = command_line.values
    nproc = _nproc(command_line, environ)
    cpus, unbound = _cpus(values.numa_binding, nproc, environ)
    job = environ.get("ELASTIPOD_JOB", "")
    run_id = values.rdzv_id if values.rdzv_id != "none" else job or "none"
    inprocess_timeout_s, inprocess_warnings = _inprocess(values, nproc, environ)
    settings = Settings(
        host=values.server_host,
        port=_port(values.server_port, environ),
        server_log_level=values.server_log_level,
        shutdown_signal=signal.Signals[values.shutdown_signal].value,
        shutdown_timeout_s=_not_negative("--shutdown-timeout", values.shutdown_timeout),
        server_shutdown_timeout_s=_not_negative("--server-shutdown-timeout", values.server_shutdown_timeout),
        layout=Layout(
            nproc=nproc,
            run_id=run_id,
            role=values.role,
            max_restarts=_not_negative("--max-restarts", values.max_restarts),
            own_devices=_own_devices(nproc, environ) if values.virtual_local_rank else (),
            keeps_processes=values.inprocess_restart,
        ),
        command=_command(command_line, environ),
        is_python=not values.no_python,
        script_file=None if values.module or values.no_python else command_line.script,
        pre_script=_script(values.pre_train_script, values.pre_train_args),
        post_script=_script(values.post_train_script, values.post_train_args),
        logs=read_log_settings(command_line, environ, run_id),
        job=job,
        is_warm=not values.no_warm_workers,
        preload=_preload(values.preload),
        is_inprocess=values.inprocess_restart,
        inprocess_timeout_s=inprocess_timeout_s,
        hang_timeout_s=_hang_timeout(values.hang_timeout),
        metrics_port=_metrics_port(values.metrics_port),
        cpus=cpus,
    )
    _check_nnodes(values.nnodes)
    warnings = _warnings(command_line, environ) + unbound + inprocess_warnings
    warnings += nccl_warnings(environ, keeps_processes=values.inprocess_restart)
    if settings.logs.directory is not None and not values.log_dir:
        warnings.append(f"log files of the workers go to {settings.logs.directory}, because --log-dir is not given")
    return settings, warnings


def _port(given: int | None, environ: Mapping[str, str]) -> int:
    if given is not None:
        where, text = "--server-port", str(given)
    else:
        where, text = "ELASTIPOD_AGENT_PORT", environ.get("ELASTIPOD_AGENT_PORT") or str(DEFAULT_PORT)
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise BadUsage(f"{where} is {text!r}; it must be a port number")
    return int(text)


def _nproc(command_line: CommandLine, environ: Mapping[str, str]) -> int:
    is_given = (
        any(option.dest == "nproc_per_node" for option, _ in command_line.given) or "PET_NPROC_PER_NODE" in environ
    )
    wanted = command_line.values.nproc_per_node if is_given else environ.get("NPROC_PER_NODE") or "1"
    try:
        return resolve_nproc(wanted, environ)
    except BadWorkerCount as error:
        raise BadUsage(str(error)) from error


def _own_devices(nproc: int, environ: Mapping[str, str]) -> tuple[dict[str, str], ...]:
    try:
        return own_devices(nproc, environ)
    except BadWorkerCount as error:
        raise BadUsage(str(error)) from error


def _inprocess(values: argparse.Namespace, nproc: int, environ: Mapping[str, str]) -> tuple[int, list[str]]:
    """Give the seconds that workers have to reach the barrier, and warnings about variables of checkpointless training."""
    given = values.inprocess_timeout
    if given is not None:
        _not_negative("--inprocess-timeout", given)
    try:
        warnings = check_variables(environ, nproc=nproc, is_inprocess=values.inprocess_restart, timeout_given=given)
        return timeout_of(environ if values.inprocess_restart else {}, given), warnings
    except BadVariable as error:
        raise BadUsage(str(error)) from error


def _cpus(mode: str | None, nproc: int, environ: Mapping[str, str]) -> tuple[tuple[frozenset[int], ...], list[str]]:
    """Give the CPUs of each worker, or a warning if they cannot be bound: training is slower then, but possible."""
    if mode is None:
        return (), []
    try:
        topology = read_topology(environ)
        return tuple(cpus_for(mode, rank, topology) for rank in range(nproc)), []
    except NoBinding as error:
        return (), [f"--numa-binding={mode} is not applied: {error}"]


def _command(command_line: CommandLine, environ: Mapping[str, str]) -> tuple[str, ...]:
    values = command_line.values
    if values.no_python:
        if values.module:
            raise BadUsage("--no-python and --module cannot be used together")
        return (command_line.script, *command_line.script_args)
    python = environ.get("PYTHON_EXEC") or sys.executable
    if values.run_path:
        return (python, "-u", "-c", _RUN_PATH, command_line.script, *command_line.script_args)
    return (python, "-u", *(["-m"] if values.module else []), command_line.script, *command_line.script_args)


def _script(path: str | None, args: str) -> Script | None:
    if not path:
        return None
    try:
        return Script(path, tuple(shlex.split(args)))
    except ValueError as error:
        raise BadUsage(f"the arguments of {path} cannot be split: {error}") from error


def _check_nnodes(text: str) -> None:
    is_unknown_variable = re.fullmatch(r"\$\(\w+\)", text)  # to Kubernetes; the operator sets the number
    if text and not is_unknown_variable and not re.fullmatch(r"[0-9]+(:[0-9]+)?", text):
        raise BadUsage(f"--nnodes is {text!r}; it must be a number or MIN:MAX")


def _not_negative(option: str, value: int) -> int:
    if value < 0:
        raise BadUsage(f"{option} is {value}; it must not be negative")
    return value


def _preload(text: str) -> tuple[str, ...]:
    names = tuple(name for name in (one.strip() for one in text.split(",")) if name)
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise BadUsage(f"--preload names {name!r}, which is not a module name")
    return names


def _hang_timeout(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise BadUsage(f"--hang-timeout is {text!r}; it must be auto, 0 or a number of seconds")
    return value


def _metrics_port(value: int) -> int:
    if not 0 <= value <= 65535:
        raise BadUsage(f"--metrics-port is {value}; it must be a port number, or 0 for none")
    return value


def _warnings(command_line: CommandLine, environ: Mapping[str, str]) -> list[str]:
    """Name what was given, as an option or as its variable, and changes nothing."""
    given = {option: (option.name, value) for option, value in command_line.given}
    for option in TORCHRUN_OPTIONS:
        if environ.get(variable(option)):
            given.setdefault(option, (variable(option), environ[variable(option)]))
    said: list[str] = []
    unused: dict[str, list[str]] = {}
    for option, (name, value) in given.items():
        if option.dest == "rdzv_backend" and value != "hyperpod":
            said.append(f"{name}={value} is not used: inside a pod the rendezvous backend is always hyperpod")
        elif option.unused:
            unused.setdefault(option.unused, []).append(name)
    for why, names in unused.items():
        said.append(f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect inside a pod: {why}")
    return said


async def find_missing_script(settings: Settings) -> str | None:
    """Do as `missing_script` does, off the event loop; None if the script's storage hangs: the start of the workers will show it."""
    try:
        return await in_thread(lambda: missing_script(settings))
    except TimeoutError:
        return None


def missing_script(settings: Settings) -> str | None:
    """Say that the training script is missing; None if it exists. A directory with a __main__.py is a script. May block."""
    file = settings.script_file
    if file is None or os.path.isfile(file) or os.path.isfile(os.path.join(file, "__main__.py")):
        return None
    return f"training script {file} {'is a directory' if os.path.isdir(file) else 'does not exist'}"
