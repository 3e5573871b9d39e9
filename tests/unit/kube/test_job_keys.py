"""Keys of jobs: derived, never read; recognized by the name of their Secret."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.kube.bodies import job_body, pod_body

from elastipod_operator.agents.authentication import NO_CREDENTIALS
from elastipod_operator.core.snapshot import ObservedJob
from elastipod_operator.kube.job_keys import (
    InvalidInstallKey,
    JobKeys,
    key_entries,
    key_secret_of,
    read_install_keys,
    secret_manifest,
)
from elastipod_operator.kube.observed_job import observe_job
from elastipod_operator.kube.observed_pod import observe_pod

KEY, NEW_KEY = b"k" * 32, b"n" * 32
JOB_KEYS = JobKeys((KEY,))


def job(spec: dict[str, Any] | None = None, **meta: Any) -> ObservedJob:
    return observe_job(job_body(spec, **meta))


def held(keys: JobKeys, secret: str, fact: ObservedJob | None = None) -> tuple[str, str]:
    """Give key and token of a pod that refers to a Secret."""
    pod = observe_pod(pod_body(), "train")
    assert pod is not None
    credentials = keys.credentials_of(fact or job(), replace(pod, key_secret=secret))
    assert not secret or credentials == NO_CREDENTIALS or credentials.pod == pod.name
    return credentials.key, credentials.token


def test_key_and_token_are_hmacs_of_the_jobs_uid() -> None:
    token = JOB_KEYS.of(job())
    assert token is not None
    assert token.token == hmac.new(KEY, b"job-uid", hashlib.sha256).hexdigest(), "as the previous version derives it"
    assert token.key == hmac.new(KEY, b"elastipod-mac-key job-uid", hashlib.sha256).hexdigest()
    assert token.secret.startswith("job-elastipod-key-")
    for secret in (token.token, token.key):
        assert secret not in repr(token) + repr(JOB_KEYS)


def test_a_pod_of_the_previous_version_holds_the_token_alone() -> None:
    token = JOB_KEYS.of(job())
    assert token is not None
    fingerprint = hashlib.sha256(token.token.encode()).hexdigest()[:10]
    assert token.legacy_secret == f"job-elastipod-token-{fingerprint}"
    assert held(JOB_KEYS, token.legacy_secret) == ("", token.token)
    assert KEY.decode() not in repr(JOB_KEYS)


def test_every_job_has_its_own_also_under_the_same_name() -> None:
    one, other = JOB_KEYS.of(job()), JOB_KEYS.of(job(uid="made anew"))
    assert one is not None
    assert other is not None
    assert one.token != other.token
    assert one.secret != other.secret, "the former job's Secret may not be gone yet"


def test_the_longest_job_name_fits() -> None:
    token = JOB_KEYS.of(job(name="j" * 63))
    assert token is not None
    assert len(token.secret) <= 253


@pytest.mark.parametrize(
    ("keys", "spec"),
    [
        pytest.param(JobKeys(), {}, id="no install key"),
        pytest.param(JOB_KEYS, {"elastipod": {"authentication": "Off"}}, id="turned off"),
        pytest.param(JOB_KEYS, {"nprocPerNode": "many"}, id="a job that cannot be used"),
    ],
)
def test_who_gets_none(keys: JobKeys, spec: dict[str, Any]) -> None:
    assert keys.of(job(spec)) is None


def test_a_pod_keeps_its_token_when_the_job_gets_none_any_more_or_the_key_is_changed() -> None:
    before = JOB_KEYS.of(job())
    assert before is not None
    off = job({"elastipod": {"authentication": "Off"}})
    assert held(JOB_KEYS, before.secret, off) == (before.key, before.token)
    rotated = JobKeys((NEW_KEY, KEY))
    after = rotated.of(job())
    assert after is not None
    assert after.secret != before.secret
    assert held(rotated, before.secret) == (before.key, before.token)
    assert held(rotated, after.secret) == (after.key, after.token)
    assert held(JobKeys((NEW_KEY,)), before.secret) == ("", "")


@pytest.mark.parametrize("secret", ["", "foreign"])
def test_what_is_not_ours_is_shown_no_token(secret: str) -> None:
    assert held(JOB_KEYS, secret) == ("", "")


def test_the_secret_goes_with_the_job_and_is_never_changed() -> None:
    token = JOB_KEYS.of(job())
    assert token is not None
    made = secret_manifest(job(), token)
    meta = made["metadata"]
    assert (meta["name"], meta["namespace"], made["immutable"]) == (token.secret, "team", True)
    assert [(owner["kind"], owner["uid"], owner["controller"]) for owner in meta["ownerReferences"]] == [
        ("HyperPodPyTorchJob", "job-uid", True)
    ]
    assert made["stringData"] == {"key": token.key, "token": token.token}


@pytest.mark.parametrize(
    ("containers", "secret"),
    [
        pytest.param([{"name": "train", "env": key_entries("s")}], "s", id="the agent's container"),
        pytest.param(
            [{"name": "worker", "env": key_entries("s")}, {"name": "side"}],
            "s",
            id="of another template, the first one",
        ),
        pytest.param([{"name": "train", "env": key_entries("s")[1:]}], "s", id="of the previous version"),
        pytest.param([{"name": "side", "env": key_entries("s")}, {"name": "train"}], "", id="another one's"),
        pytest.param([{"name": "train", "env": [{"name": "ELASTIPOD_TOKEN", "value": "x"}]}], "", id="the user's own"),
        pytest.param([{"name": "train", "env": None}], "", id="a pod without"),
        pytest.param([], "", id="no containers"),
    ],
)
def test_which_token_a_pod_holds_is_read_from_its_environment(containers: list[dict[str, Any]], secret: str) -> None:
    body = pod_body()
    body["spec"]["containers"] = containers
    assert key_secret_of(body, "train") == secret
    fact = observe_pod(body, "train")
    assert fact is not None
    assert fact.key_secret == secret


def test_keys_are_read_from_a_file_the_newest_first(tmp_path: Path) -> None:
    path = tmp_path / "install-key"
    path.write_bytes(b"\n" + NEW_KEY + b"\r\n\n  " + KEY + b"  \n")
    assert read_install_keys(str(path)) == (NEW_KEY, KEY)
    assert read_install_keys("") == ()


@pytest.mark.parametrize(
    "content", [b"", b"short", KEY + b"\nshort"], ids=["empty", "short", "an earlier one is short"]
)
def test_a_key_that_could_be_guessed_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "install-key"
    path.write_bytes(content)
    with pytest.raises(InvalidInstallKey, match="at least 32 bytes") as refused:
        read_install_keys(str(path))
    assert "short" not in str(refused.value)


def test_a_key_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidInstallKey, match=r"cannot be read: .*none: No such file"):
        read_install_keys(str(tmp_path / "none"))
