"""`elastipod agent status`: shows the state of the agent of this pod: kubectl exec POD -- elastipod agent status."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from elastipod_agent.authentication import KEY_ENV, bearer, challenge_in, read_credentials, signed
from elastipod_agent.endpoint_file import AgentEndpoint, find_agents
from elastipod_agent.settings import DEFAULT_PORT
from elastipod_agent.status_text import AgentAddress, describe

PROG = "elastipod agent"
USAGE_ERROR = 2
TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 16 * 1024 * 1024
STATUS_TARGET = "/status?details=1"
_CLEAR = "\x1b[2J\x1b[H"


class AgentUnreachable(Exception):
    """The agent does not answer as expected; the sentence says what to check."""


class AmbiguousAgent(Exception):
    """Several agents run on this host and none was named."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit status: 0 the agent answered, 1 it did not, 2 a usage error."""
    args = _parser().parse_args(argv)
    try:
        target = find_agent(args.port, find_agents(), os.environ)
        while True:
            status = fetch_status(target)
            text = json.dumps(status) if args.json else "\n".join(describe(status, target, time.time()))
            if args.watch is not None and sys.stdout.isatty() and not args.json:
                text = _CLEAR + text
            print(text, flush=True)
            if args.watch is None:
                return 0
            time.sleep(args.watch)
            if not args.json and not sys.stdout.isatty():
                print()
    except AmbiguousAgent as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except AgentUnreachable as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or the interpreter reports the broken pipe once more
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, description="Query the agent (hyperpodrun) of this pod.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    status = commands.add_parser(
        "status",
        help="show the state of the agent and its workers",
        description="Show the state of the agent and its workers. Inside the pod, the port and the key are found automatically.",
    )
    status.add_argument("--port", type=_port, help="port of the agent (default: found automatically)")
    status.add_argument("--json", action="store_true", help="print the agent's answer, one JSON object per line")
    status.add_argument(
        "--watch", type=_seconds, nargs="?", const=2.0, metavar="SECONDS", help="repeat every SECONDS (default: 2)"
    )
    return parser


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return value


def find_agent(port: int | None, agents: Sequence[AgentEndpoint], environ: Mapping[str, str]) -> AgentAddress:
    """Find the agent: by the given port, else the only agent on this host, else by the environment.

    Raises AmbiguousAgent if several agents run on this host and the environment names none of them.
    """
    credentials = read_credentials(environ)
    configured_port = environ.get("ELASTIPOD_AGENT_PORT", "")
    wanted = port or (int(configured_port) if configured_port.isascii() and configured_port.isdigit() else None)
    same = [agent for agent in agents if agent.port == wanted]
    if port is None and not same and len(agents) > 1:
        listed = ", ".join(sorted(f"{one.port} ({one.job or 'no job'})" for one in agents))
        raise AmbiguousAgent(f"several agents run here; choose one with --port: {listed}")
    if same or (port is None and agents):
        chosen = (same or list(agents))[0]
        return AgentAddress(chosen.address, chosen.port, credentials)
    return AgentAddress("127.0.0.1", wanted or DEFAULT_PORT, credentials)


def fetch_status(target: AgentAddress) -> dict[str, Any]:
    """Fetch the status. Raises AgentUnreachable."""
    where = f"port {target.port}" if target.host == "127.0.0.1" else f"{target.host}, port {target.port}"
    try:
        code, body = _fetch(target)
    except ConnectionRefusedError:
        raise AgentUnreachable(
            f"nothing listens on {where}: does hyperpodrun run in this container, or on another port (--port)?"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        why = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        raise AgentUnreachable(f"the agent on {where} does not answer ({why}): is it stopped, or busy?") from error
    if code == 401:
        held = target.credentials.key or target.credentials.token
        hint = f"${KEY_ENV} holds a different one" if held else f"${KEY_ENV} is not set here"
        raise AgentUnreachable(
            f"the agent on {where} requires the key of its job, and {hint}: run this in the agent's container"
        )
    try:
        status = json.loads(body)
    except ValueError:
        status = None
    if code != 200 or not isinstance(status, dict) or "status" not in status:
        raise AgentUnreachable(
            f"the server on {where} is not an agent (HTTP {code}): give the agent's port with --port"
        )
    return status


def _fetch(target: AgentAddress) -> tuple[int, bytes]:
    """Fetch the status; repeat the request with a MAC if the agent requires one. Raises OSError, HTTPException."""
    credentials = target.credentials
    code, challenge, body = _get(target, {} if credentials.key else bearer(credentials.token))
    if code == 401 and challenge and credentials.key:
        code, _, body = _get(target, signed(credentials, challenge, "GET", STATUS_TARGET))
    return code, body


def _get(target: AgentAddress, headers: Mapping[str, str]) -> tuple[int, str, bytes]:
    """Give status code, challenge ("" if there is none) and body."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", STATUS_TARGET, headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, challenge_in(answer.getheader("WWW-Authenticate", "")), answer.read(MAX_ANSWER_BYTES)
    finally:
        connection.close()
