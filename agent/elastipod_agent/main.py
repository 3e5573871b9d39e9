"""Entry point of ``hyperpodrun``: decide whether this is a pod's agent or torchrun, and become it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from elastipod_agent import torchrun
from elastipod_agent.agent import Agent
from elastipod_agent.arguments import PROG, CommandLine, UnknownOption, parse
from elastipod_agent.log import EventLog
from elastipod_agent.server.api import ControlApi, body_limit
from elastipod_agent.server.http import HttpServer, Request, Response
from elastipod_agent.settings import BadUsage, Settings, read_settings
from elastipod_agent.workers.failure import write_termination_message
from elastipod_agent.workers.output import OutputPump

_FOREIGN = "hyperpod_elastic_agent-*"  # how pip and friends name the record of AWS's distribution
_LAST_ANSWERS_S = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run. Exit codes: 2 for a bad command line, 1 for what the machine refuses or a faulted run, see `agent_exit_code`."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    foreign = foreign_agent(sys.path)
    if foreign is not None:
        return _give_up(
            f"AWS's own hyperpod-elastic-agent is installed here too ({foreign}) and brings the same command and import "
            "names as elastipod; uninstall one of the two",
            2,
        )
    try:
        if given[:1] and given[0].replace("_", "-").startswith("--print-completion"):
            torchrun.print_completion(given)
        line = parse_command_line(given, os.environ)
        if line.values.standalone or "KUBERNETES_SERVICE_HOST" not in os.environ:
            torchrun.hand_over(line)
        settings, warnings = read_settings(line, os.environ)
    except torchrun.TorchMissing as error:
        return _give_up(str(error), 1)
    except BadUsage as error:
        return _give_up(str(error), 2)
    return run_agent(settings, warnings, os.environ)


def parse_command_line(arguments: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Parse; an option that our table lacks is looked up in the installed torch before it is called a mistake."""
    try:
        return parse(arguments, environ)
    except UnknownOption:
        return parse(arguments, environ, learned=torchrun.installed_options())


def foreign_agent(paths: Sequence[str]) -> str | None:
    """Give the place where AWS's own agent distribution is installed, None where it is not."""
    for path in paths:
        for record in Path(path or ".").glob(_FOREIGN):
            if record.suffix in (".dist-info", ".egg-info"):
                return str(record)
    return None


def run_agent(settings: Settings, warnings: Sequence[str], environ: Mapping[str, str]) -> int:
    """Be the agent of this pod until it is told to leave; gives the exit code."""
    pump = OutputPump()
    pump.start()
    log = EventLog(pump.say, settings.job)
    for warning in warnings:
        log.warning(warning)
    try:
        with TemporaryDirectory(prefix="elastipod-", dir=_fast_directory(), ignore_cleanup_errors=True) as root:
            return asyncio.run(_serve(settings, environ, Path(root), pump, log))
    except OSError as error:
        sentence = f"{error.strerror or error}" if error.filename is None else f"{error.filename}: {error.strerror}"
        log.error("cannot run", why=sentence)
        write_termination_message(sentence)
        return 1
    finally:
        pump.close()


async def _serve(settings: Settings, environ: Mapping[str, str], root: Path, pump: OutputPump, log: EventLog) -> int:
    agent = Agent(settings, dict(environ), root, pump, log)
    calls = _CallLog(log, settings.server_log_level)
    server = HttpServer(ControlApi(agent, calls.answered).handle, body_limit, calls.refused)
    try:
        port = await server.listen(settings.host, settings.port)
    except OSError as error:
        raise OSError(error.errno, _cannot_listen(settings, error)) from error
    await agent.begin(port)
    code = await agent.live()
    await server.close(_LAST_ANSWERS_S)
    return code


def _fast_directory() -> str | None:
    """Prefer memory to a disk for the worker file; None = the system's place for temporary files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None  # noqa: S108 a private folder is made in it


def _cannot_listen(settings: Settings, error: OSError) -> str:
    where = f"{settings.host}:{settings.port}"
    return (
        f"cannot listen on {where}: {os.strerror(error.errno) if error.errno else error}; choose another --server-port"
    )


class _CallLog:
    """What --server-log-level governs: refused calls from info on, all calls from debug on."""

    def __init__(self, log: EventLog, level: str) -> None:
        self._log = log
        self._has_refusals = level not in ("warning", "error", "critical")
        self._has_all = level in ("debug", "trace")

    def answered(self, request: Request, response: Response) -> None:
        if self._has_all or (self._has_refusals and response.status >= 400 and response.status != 409):
            detail = response.body.get("detail") if isinstance(response.body, dict) else None
            self._log.info("call", method=request.method, path=request.path, status=int(response.status), detail=detail)

    def refused(self, why: str) -> None:
        if self._has_refusals:
            self._log.info("call refused", why=why)


def _give_up(sentence: str, code: int) -> int:
    print(f"{PROG}: error: {sentence}", file=sys.stderr)
    write_termination_message(f"{PROG}: {sentence}")
    return code
