"""Mistakes to plant in how operators and agents know each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastipod_agent.authentication import MacGuard
from elastipod_agent.server.http import Admission
from elastipod_agent.server.http_messages import Head
from elastipod_operator.agents.authentication import Authenticator, Call
from elastipod_operator.kube.job_keys import JobKeys
from elastipod_operator.pod_creation import PodCreation


def forget_the_install_key_before(patch: pytest.MonkeyPatch) -> None:
    real = JobKeys.credentials
    patch.setattr(JobKeys, "credentials", lambda self, *which: real(replace(self, keys=self.keys[:1]), *which))


def believe_answers_without_a_mac(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Authenticator, "check", lambda self, call, response: None)


def take_a_call_twice(patch: pytest.MonkeyPatch) -> None:
    real = MacGuard.admit

    def admit(self: MacGuard, head: Head) -> Admission:
        self._nonces.clear()
        return real(self, head)

    patch.setattr(MacGuard, "admit", admit)


def send_the_token_to_everybody(patch: pytest.MonkeyPatch) -> None:
    real = Authenticator.sign

    def sign(self: Authenticator, *call: Any) -> Call:
        signed = real(self, *call)
        shown = {"Authorization": f"Bearer {self.credentials.token}"} if self.credentials.token else {}
        return signed if signed.headers else Call(shown)

    patch.setattr(Authenticator, "sign", sign)


def make_the_secret_for_new_pods_alone(patch: pytest.MonkeyPatch) -> None:
    real = PodCreation.create_secret

    async def create_secret(self: PodCreation, job: Any, actions: Any) -> bool:
        return await real(self, job, actions) if actions else True

    patch.setattr(PodCreation, "create_secret", create_secret)
