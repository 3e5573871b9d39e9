"""Keys of jobs, with which the operator and the agents of a job authenticate each other (docs/design/contracts.md, 12).

A job's key is derived from the install key and the job's UID. It reaches the agent through a Secret that the job owns. The
operator creates such Secrets but never reads them: it derives the key whenever it needs it. The Secret's name depends on the
key, so the name in a pod shows whether its key comes from the present install key, an earlier one, or another source.

The Secret also holds a bearer token for agents of the previous version in users' images. Token and key cannot be derived
from each other. Pods that an operator of the previous version created refer to a Secret with the token alone.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..agents.authentication import NO_CREDENTIALS, Credentials
from ..core.names import API_VERSION, KIND, LABEL_JOB, LABEL_UID
from ..core.snapshot import ObservedJob, ObservedPod
from .containers import agent_container_of_pod
from .reading import mapping, mappings, text

# Variables of the agent's container, and the entries of the Secret that they come from.
KEY_ENV, KEY_ENTRY = "ELASTIPOD_KEY", "key"
TOKEN_ENV, TOKEN_ENTRY = "ELASTIPOD_TOKEN", "token"  # names
MIN_KEY_BYTES = 32


class InvalidInstallKey(ValueError):
    """The install key cannot be used; the sentence says why."""


@dataclass(frozen=True, slots=True)
class JobKey:
    """The key of one job, the token for agents of the previous version, and the name of the Secret that carries both."""

    secret: str
    key: str = field(repr=False)
    token: str = field(repr=False)

    @property
    def legacy_secret(self) -> str:
        """Give the name of the Secret of an operator of the previous version, which holds the token alone."""
        return self.secret.rpartition("-elastipod-key-")[0] + f"-elastipod-token-{_fingerprint(self.token)}"


@dataclass(frozen=True, slots=True)
class JobKeys:
    """Derives the keys of jobs. keys: the install key, then earlier ones, whose pods may still run; empty: no keys."""

    keys: tuple[bytes, ...] = field(default=(), repr=False)

    def of(self, job: ObservedJob) -> JobKey | None:
        """Give the key for new pods of the job; None if they get none."""
        is_wanted = job.policy is not None and job.policy.has_key
        return _job_key(self.keys[0], job.name, job.uid) if self.keys and is_wanted else None

    def credentials_of(self, job: ObservedJob, pod: ObservedPod) -> Credentials:
        """Give the credentials of a pod's agent; empty for a pod without a key or with an unknown one."""
        return self.credentials(job.name, job.uid, pod.name, pod.key_secret)

    def credentials(self, job_name: str, job_uid: str, pod_name: str, secret: str) -> Credentials:
        """Give the credentials of a pod that refers to a Secret ("" for none)."""
        for install_key in self.keys if secret else ():
            known = _job_key(install_key, job_name, job_uid)
            if known.secret == secret:
                return Credentials(pod_name, known.key, known.token)
            if known.legacy_secret == secret:
                return Credentials(pod_name, token=known.token)
        return NO_CREDENTIALS


@lru_cache(maxsize=4096)
def _job_key(install_key: bytes, job_name: str, job_uid: str) -> JobKey:
    key, token = _derived(install_key, f"elastipod-mac-key {job_uid}"), _derived(install_key, job_uid)
    return JobKey(f"{job_name}-elastipod-key-{_fingerprint(key)}", key, token)


def _derived(install_key: bytes, purpose: str) -> str:
    return hmac.new(install_key, purpose.encode(), hashlib.sha256).hexdigest()


def _fingerprint(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()[:10]


def secret_manifest(job: ObservedJob, key: JobKey) -> dict[str, Any]:
    """Give the Secret to create; it is deleted with the job."""
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": job.uid, "controller": True}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": key.secret,
            "namespace": job.namespace,
            "labels": {LABEL_JOB: job.name, LABEL_UID: job.uid},
            "ownerReferences": [{**owner, "blockOwnerDeletion": True}],
        },
        "type": "Opaque",
        "immutable": True,
        "stringData": {KEY_ENTRY: key.key, TOKEN_ENTRY: key.token},
    }


def key_entries(secret: str) -> list[dict[str, Any]]:
    """Give the variables of the agent's container."""
    entries = ((KEY_ENV, KEY_ENTRY), (TOKEN_ENV, TOKEN_ENTRY))
    return [{"name": env, "valueFrom": {"secretKeyRef": {"name": secret, "key": entry}}} for env, entry in entries]


def key_secret_of(body: Mapping[str, Any], container: str) -> str:
    """Give the Secret that holds the key, or only the token, of a pod's agent; "" for none. container: as for `observe_pod`."""
    agent = agent_container_of_pod(mappings(mapping(body.get("spec")).get("containers")), container)
    for entry in mappings(agent.get("env")) if agent is not None else ():
        if entry.get("name") in (KEY_ENV, TOKEN_ENV):
            return text(mapping(mapping(entry.get("valueFrom")).get("secretKeyRef")).get("name"))
    return ""


def read_install_keys(path: str) -> tuple[bytes, ...]:
    """Read the install key from a file; further lines are earlier keys. No path, no keys. Raises InvalidInstallKey."""
    if not path:
        return ()
    try:
        lines = [line.strip() for line in Path(path).read_bytes().splitlines()]
    except OSError as error:
        raise InvalidInstallKey(f"the install key cannot be read: {path}: {error.strerror}") from error
    keys = tuple(line for line in lines if line)
    if not keys or min(map(len, keys)) < MIN_KEY_BYTES:
        raise InvalidInstallKey(
            f"the install key in {path} must have at least {MIN_KEY_BYTES} bytes in each of its lines"
        )
    return keys
