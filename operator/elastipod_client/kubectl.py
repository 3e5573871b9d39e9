"""Calls to the API server by way of kubectl.

kubectl reads kubeconfig files and runs the login plugins of every provider, and `kubectl elastipod` has it by definition; so
these commands authenticate as kubectl does and need no package of their own.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .child import run_child

REQUEST_TIMEOUT_S = 20
# kubectl ends by itself at its own limit; this one only ends a login plugin that hangs.
CALL_LIMIT_S = 120.0
# Lines of kubectl's own log, and warnings of the API server, beside the reason of a failure.
BESIDE = re.compile(r"[WIE]\d{4} \d\d:|Warning:")
# The API server ends the list of a refused object's errors with this one.
NOT_CHECKED = "some validation rules were not checked"
# A login plugin may print pages. What failed is at their beginning or their end.
MAX_SAID = 1500


class KubectlError(Exception):
    """A call failed; the text says why in one sentence."""


class NotFoundError(KubectlError):
    """The object, or its kind, does not exist."""


class UnknownKindError(NotFoundError):
    """The API server does not serve the kind; one that has just started serves it a moment later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubectl:
    """How to reach the API server. Empty options have kubectl's own defaults."""

    namespace: str = ""
    context: str = ""
    kubeconfig: str = ""

    def command(self, *args: str) -> list[str]:
        """Give the command line of a call."""
        options = {"--namespace": self.namespace, "--context": self.context, "--kubeconfig": self.kubeconfig}
        return ["kubectl", *args, *(f"{option}={value}" for option, value in options.items() if value)]

    def run(self, *args: str, stdin: str | None = None) -> str:
        """Run a call to its end; gives what it printed. Raises KubectlError, or NotFoundError."""
        require_kubectl()
        command = self.command(*args, f"--request-timeout={REQUEST_TIMEOUT_S}s")
        try:
            done = run_child(command, stdin=stdin, limit_s=CALL_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise KubectlError(f"kubectl has not answered for {CALL_LIMIT_S:.0f} s") from error
        if done.returncode == 0:
            return done.stdout
        raise failure(done.stderr, done.returncode)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """Get one object. Raises KubectlError, or NotFoundError."""
        found: dict[str, Any] = json.loads(self.run("get", kind, name, "-o", "json"))
        return found

    def items(self, kind: str, *options: str) -> list[dict[str, Any]]:
        """List objects. Raises KubectlError, or NotFoundError for a kind that does not exist."""
        found: list[dict[str, Any]] = json.loads(self.run("get", kind, *options, "-o", "json"))["items"]
        return found

    def named(self, kind: str, names: Sequence[str]) -> list[dict[str, Any]]:
        """Get those of some objects that exist. Raises KubectlError."""
        printed = self.run("get", kind, *names, "--ignore-not-found", "-o", "json") if names else ""
        found: dict[str, Any] = json.loads(printed) if printed.strip() else {"items": []}
        items: list[dict[str, Any]] = found["items"] if found.get("kind", "List") == "List" else [found]
        return items

    def create(self, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Create objects; gives what the API server answered, in their order. Raises KubectlError."""
        asked = {"apiVersion": "v1", "kind": "List", "items": bodies}
        return documents(self.run("create", "-f", "-", "-o", "json", stdin=json.dumps(asked)))

    def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> str:
        """Apply a merge patch; gives kubectl's sentence. Raises KubectlError, or NotFoundError."""
        return self.run("patch", kind, name, "--type=merge", "-p", json.dumps(change)).strip()


def documents(printed: str) -> list[dict[str, Any]]:
    """Read JSON documents that stand one behind the other, as kubectl prints several objects that it created."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while (rest := printed[at:].lstrip()) != "":
        one, length = decoder.raw_decode(rest)
        found.append(one)
        at = len(printed) - len(rest) + length
    return found


def require_kubectl() -> None:
    """Raise KubectlError if there is no kubectl."""
    if shutil.which("kubectl") is None:
        raise KubectlError("there is no kubectl in PATH; install it (https://kubernetes.io/docs/tasks/tools/)")


def failure(stderr: str, status: int) -> KubectlError:
    """Give the error for a call that failed with this exit status, in one sentence that keeps every reason."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = [line for line in lines if not BESIDE.match(line)] or lines
    message = _sentence([line for line in said if NOT_CHECKED not in line] or said)
    text = message.removeprefix("error: ").removeprefix("Error from server ").strip()
    if not text:
        return KubectlError(
            f"kubectl failed with exit code {status} and said nothing; try the same call with kubectl -v=6"
        )
    unknown_kind = ("the server doesn't have a resource type", "could not find the requested resource")
    if any(words in message for words in unknown_kind):
        return UnknownKindError(text)
    return NotFoundError(text) if "(NotFound)" in message else KubectlError(text)


def _sentence(lines: Sequence[str]) -> str:
    """Join lines: the items of a list stand behind the line that ends with a colon."""
    text = ""
    for line in lines:
        item = line.removeprefix("* ")
        text += item if not text else f"{' ' if text.endswith(':') else '; '}{item}"
    return text if len(text) <= MAX_SAID else f"{text[: MAX_SAID // 2]} ... {text[-MAX_SAID // 2 :]}"
