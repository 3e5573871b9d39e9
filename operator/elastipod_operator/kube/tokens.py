"""Tokens of jobs: the operator proves itself to the agents of a job without keeping or reading anything (decision 34).

token = HMAC-SHA256(install key, job UID). It reaches the agent through a Secret that the job owns; the operator only ever
creates such Secrets and works the token out again whenever it needs it. The Secret's name depends on the token, so a pod
tells by the name to which it refers whether it holds the token of today's install key, of an earlier one, or none of ours.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..core.facts import JobFact
from ..core.names import API_VERSION, KIND, LABEL_JOB, LABEL_UID

ENV_NAME = "ELASTIPOD_TOKEN"
SECRET_KEY = "token"  # noqa: S105 the name of the entry in the Secret
MIN_KEY_BYTES = 32


class KeyProblem(ValueError):
    """The install key cannot be used; the sentence says why."""


@dataclass(frozen=True, slots=True)
class JobToken:
    """The token of one job and the name of the Secret that carries it."""

    secret: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Works tokens out. keys: the install key, then earlier ones, whose pods may still run; empty: no tokens."""

    keys: tuple[bytes, ...] = field(default=(), repr=False)

    def of(self, job: JobFact) -> JobToken | None:
        """Give the token that the job's new pods get; None when they get none."""
        wanted = job.policy is not None and job.policy.has_token
        return _job_token(self.keys[0], job.name, job.uid) if self.keys and wanted else None

    def held_by(self, job: JobFact, secret: str) -> str:
        """Give the token of a pod that refers to this Secret; "" when it has none, or one that is not known here."""
        known = (_job_token(key, job.name, job.uid) for key in self.keys) if secret else ()
        return next((one.token for one in known if one.secret == secret), "")


@lru_cache(maxsize=4096)
def _job_token(key: bytes, job_name: str, job_uid: str) -> JobToken:
    token = hmac.new(key, job_uid.encode(), hashlib.sha256).hexdigest()
    return JobToken(f"{job_name}-elastipod-token-{hashlib.sha256(token.encode()).hexdigest()[:10]}", token)


def secret_manifest(job: JobFact, token: JobToken) -> dict[str, Any]:
    """Give the Secret to be created; it goes with the job."""
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": job.uid, "controller": True}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": token.secret,
            "namespace": job.namespace,
            "labels": {LABEL_JOB: job.name, LABEL_UID: job.uid},
            "ownerReferences": [{**owner, "blockOwnerDeletion": True}],
        },
        "type": "Opaque",
        "immutable": True,
        "stringData": {SECRET_KEY: token.token},
    }


def token_entry(secret: str) -> dict[str, Any]:
    """Give the variable of the agent's container."""
    return {"name": ENV_NAME, "valueFrom": {"secretKeyRef": {"name": secret, "key": SECRET_KEY}}}


def secret_of(body: Mapping[str, Any], container: str) -> str:
    """Give the Secret from which a pod's agent has its token; "" for none."""
    containers = (body.get("spec") or {}).get("containers") or ()
    agent = next((one for one in containers if one.get("name") == container), None)
    for entry in (agent or {}).get("env") or ():
        if entry.get("name") == ENV_NAME:
            return str(((entry.get("valueFrom") or {}).get("secretKeyRef") or {}).get("name") or "")
    return ""


def read_install_keys(path: str) -> tuple[bytes, ...]:
    """Read the install key from a file; further lines are earlier keys. No path, no keys. Raises KeyProblem."""
    if not path:
        return ()
    try:
        lines = [line.strip() for line in Path(path).read_bytes().splitlines()]
    except OSError as error:
        raise KeyProblem(f"the install key cannot be read: {path}: {error.strerror}") from error
    keys = tuple(line for line in lines if line)
    if not keys or min(map(len, keys)) < MIN_KEY_BYTES:
        raise KeyProblem(f"the install key in {path} must have at least {MIN_KEY_BYTES} bytes in each of its lines")
    return keys
