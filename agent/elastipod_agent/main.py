"""Entry point of ``hyperpodrun``: run the agent of a pod, or torchrun outside a pod."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import NoReturn

from elastipod import store_wire
from elastipod_agent import endpoint_file, torchrun
from elastipod_agent.agent import Agent
from elastipod_agent.arguments import PROG, CommandLine, UnknownOption, parse
from elastipod_agent.authentication import Credentials, admission_of, take_credentials, worker_key
from elastipod_agent.log import EventLog
from elastipod_agent.metrics import METRICS, MetricsPage, Sources, count_changes
from elastipod_agent.server.api import ControlApi, body_limit
from elastipod_agent.server.call_log import CallLog
from elastipod_agent.server.http import HttpServer
from elastipod_agent.server.store_server import StoreServer
from elastipod_agent.settings import BadUsage, Settings, read_settings
from elastipod_agent.workers.failure import write_termination_message
from elastipod_agent.workers.linux import request_short_time_slices
from elastipod_agent.workers.output_pump import OutputPump

_FOREIGN = "hyperpod_elastic_agent-*"  # the name under which pip records AWS's distribution
_LAST_ANSWERS_S = 2.0
_MAX_SCRAPERS = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Run. Exit codes: 2 for a bad command line, 1 for a system error or a faulted run; see `agent_exit_code`."""
    signal.signal(signal.SIGTERM, _leave)  # PID 1 of a container has no default action that would end it
    given = sys.argv[1:] if arguments is None else list(arguments)
    credentials = take_credentials(os.environ)  # before any process is started that could inherit them
    foreign = foreign_agent(sys.path)
    if foreign is not None:
        return _give_up(
            f"AWS's own hyperpod-elastic-agent is installed too ({foreign}) and has the same command and import "
            "names as elastipod; uninstall one of the two",
            2,
        )
    try:
        if given[:1] and given[0].replace("_", "-").startswith("--print-completion"):
            torchrun.print_completion(given)
        command_line = parse_command_line(given, os.environ)
        if command_line.values.standalone or "KUBERNETES_SERVICE_HOST" not in os.environ:
            torchrun.hand_over(command_line)
        settings, warnings = read_settings(command_line, os.environ)
    except torchrun.TorchMissing as error:
        return _give_up(str(error), 1)
    except BadUsage as error:
        return _give_up(str(error), 2)
    return run_agent(settings, warnings, os.environ, credentials)


def _leave(number: int, _: object) -> NoReturn:
    """End at once: nothing runs yet. The agent handles the signal itself once it can, and torchrun's process resets it."""
    raise SystemExit(128 + number)


def parse_command_line(arguments: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Parse. An option that the table does not name is looked up in the installed torch before it is an error."""
    try:
        return parse(arguments, environ)
    except UnknownOption:
        return parse(arguments, environ, learned=torchrun.installed_options())


def foreign_agent(paths: Sequence[str]) -> str | None:
    """Give the path where AWS's own agent distribution is installed, or None."""
    for path in paths:
        for record in Path(path or ".").glob(_FOREIGN):
            if record.suffix in (".dist-info", ".egg-info"):
                return str(record)
    return None


def run_agent(
    settings: Settings,
    warnings: Sequence[str],
    environ: Mapping[str, str],
    credentials: Credentials = Credentials(),  # noqa: B008  # frozen
) -> int:
    """Run the agent of this pod until its shutdown; gives the exit code. Without credentials every caller is admitted."""
    pump = OutputPump(settings.layout.nproc)
    pump.start()
    log = EventLog(pump.print_line, settings.job)
    for warning in warnings:
        log.warning(warning)
    request_short_time_slices()
    try:
        place = endpoint_file.fast_directory() or gettempdir()
        endpoint_file.remove_stale_folders(Path(place))
        with TemporaryDirectory(prefix=endpoint_file.FOLDER_PREFIX, dir=place, ignore_cleanup_errors=True) as root:
            return asyncio.run(_serve(settings, environ, credentials, Path(root), pump, log))
    except OSError as error:
        sentence = f"{error.strerror or error}" if error.filename is None else f"{error.filename}: {error.strerror}"
        log.error("cannot run", why=sentence)
        write_termination_message(sentence)
        return 1
    finally:
        pump.close()


async def _serve(
    settings: Settings,
    environ: Mapping[str, str],
    credentials: Credentials,
    root: Path,
    pump: OutputPump,
    log: EventLog,
) -> int:
    agent = Agent(settings, dict(environ), root, pump, log)
    calls = CallLog(log, settings.server_log_level, METRICS)
    key = worker_key(credentials)
    store = StoreServer(key, calls.refused, log.warning)
    agent.give_workers(key, store)
    control = ControlApi(agent, calls.answered, lambda: _details(settings, environ))
    admit = admission_of(credentials)
    server = HttpServer(control.handle, body_limit, calls.refused, admit=admit, upgrades={store_wire.PATH: store.serve})
    try:
        port = await server.listen(settings.host, settings.port)
    except OSError as error:
        raise OSError(error.errno, _cannot_listen(settings, error)) from error
    agent.status.on_change = lambda before, after: count_changes(before, after, METRICS)
    metrics = await _serve_metrics(settings, agent, pump, log)
    with endpoint_file.publish_endpoint(
        root, endpoint_file.AgentEndpoint(os.getpid(), settings.host, port, settings.job)
    ):
        await agent.start_up(port)
        code = await agent.run_until_shutdown()
        store.close()
        await server.close(_LAST_ANSWERS_S)
    if metrics is not None:
        await metrics.close(0)
    return code


async def _serve_metrics(settings: Settings, agent: Agent, pump: OutputPump, log: EventLog) -> HttpServer | None:
    """Serve the metrics on a port of their own, if one is given; if it is in use the agent continues without metrics."""
    if not settings.metrics_port:
        return None
    sources = Sources(
        status=lambda: agent.status.current,
        worker=lambda: agent.status_json()["worker"],
        output_bytes=lambda: pump.bytes_read,
    )
    page = MetricsPage(METRICS, sources)
    server = HttpServer(page.handle, lambda path: 0, lambda status, why: None, max_connections=_MAX_SCRAPERS)
    try:
        await server.listen(settings.host, settings.metrics_port)
    except OSError as error:
        log.warning(f"no metrics: cannot listen on {_place(settings.host, settings.metrics_port)}: {_reason(error)}")
        return None
    return server


def _details(settings: Settings, environ: Mapping[str, str]) -> dict[str, object]:
    """Give what `elastipod agent status` shows in addition to the status. An operator does not read it."""
    return {
        "job": settings.job or None,
        "pod": environ.get("ELASTIPOD_POD") or None,
        "pid": os.getpid(),
        "nproc": settings.layout.nproc,
        "is_warm": settings.is_warm,
        "warm_starts": METRICS.value("worker_starts_total", kind="warm"),
        "cold_starts": METRICS.value("worker_starts_total", kind="cold"),
        "restarts": METRICS.value("restarts_total"),
    }


def _cannot_listen(settings: Settings, error: OSError) -> str:
    is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    option = "--server-host" if is_host else "--server-port"
    return f"cannot listen on {_place(settings.host, settings.port)}: {_reason(error)}; choose another {option}"


def _place(host: str, port: int) -> str:
    return f"{host}:{port}" if host else f"port {port}"


def _reason(error: OSError) -> str:
    """Give the system's words for an error, without what asyncio adds to them. Numbers of the resolver are not the system's."""
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or str(error)
    return os.strerror(error.errno)


def _give_up(sentence: str, code: int) -> int:
    print(f"{PROG}: error: {sentence}", file=sys.stderr)
    write_termination_message(f"{PROG}: {sentence}")
    return code
