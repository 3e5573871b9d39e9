"""Calls to the API server by way of kubectl.

kubectl reads kubeconfig files and runs the login plugins of every provider, and `kubectl elastipod` has it by definition; so
these commands authenticate as kubectl does and need no package of their own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REQUEST_TIMEOUT_S = 20
# kubectl ends by itself at its own limit; this one only ends a login plugin that hangs.
CALL_LIMIT_S = 120.0


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
        if shutil.which("kubectl") is None:
            raise KubectlError("there is no kubectl in PATH; install it (https://kubernetes.io/docs/tasks/tools/)")
        command = self.command(*args, f"--request-timeout={REQUEST_TIMEOUT_S}s")
        try:
            done = subprocess.run(
                command,
                input=stdin,  # without an input of its own, a login plugin may ask the user
                capture_output=True,
                encoding="utf-8",
                errors="replace",  # a log holds whatever the script has printed
                timeout=CALL_LIMIT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise KubectlError(f"kubectl has not answered for {CALL_LIMIT_S:.0f} s") from error
        if done.returncode == 0:
            return done.stdout
        raise _error(done.stderr)

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


def _error(stderr: str) -> KubectlError:
    lines = [line for line in stderr.strip().splitlines() if not line.startswith(("W", "I", "E0", "Warning:"))]
    message = (lines or stderr.strip().splitlines() or [""])[-1]
    text = message.removeprefix("error: ").removeprefix("Error from server ").strip()
    unknown_kind = ("the server doesn't have a resource type", "could not find the requested resource")
    if any(words in message for words in unknown_kind):
        return UnknownKindError(text)
    return NotFoundError(text) if "(NotFound)" in message else KubectlError(text)
