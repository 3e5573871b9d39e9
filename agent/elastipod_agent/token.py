"""The job's token: who calls the control API of a pod that carries one must show it (decision 34).

The operator puts it into the agent container's environment from a Secret of the job. It is taken out of the
environment before anything else is started, so that no training script prints it, and no line of the agent names it.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, MutableMapping
from http import HTTPStatus

from elastipod_agent.server.http import Refused

ENV_NAME = "ELASTIPOD_TOKEN"
_REFUSAL = f"the calls of this agent need the token of its job (in the pod: ${ENV_NAME}) in the header Authorization: Bearer TOKEN"


def take_token(environ: MutableMapping[str, str]) -> str:
    """Take the token out of an environment; "" where there is none, and everybody may call."""
    return environ.pop(ENV_NAME, "").strip()


def bearer(token: str) -> dict[str, str]:
    """Give the header that shows a token; none for ""."""
    return {"Authorization": f"Bearer {token}"} if token else {}


class TokenGuard:
    """Admits the requests that show the token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def admit(self, headers: Mapping[str, str]) -> None:
        """Let a request pass. Raises Refused (401); how long that takes tells nothing about the token."""
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        is_same = hmac.compare_digest(shown.strip().encode("latin-1"), self._token)
        if not is_same or scheme.lower() != "bearer":
            raise Refused(HTTPStatus.UNAUTHORIZED, _REFUSAL, {"WWW-Authenticate": 'Bearer realm="elastipod"'})
