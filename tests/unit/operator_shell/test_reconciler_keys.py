"""Keys of jobs in the shell: the Secret first, then pods that refer to it, then calls that are signed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.agents.fake_agent import FakeAgent, serving, until
from tests.unit.agents.test_authentication import Agent, running
from tests.unit.kube.bodies import CREATED, container
from tests.unit.operator_shell.api_server import ApiServer
from tests.unit.operator_shell.shells import Shell, settled

from elastipod_agent.authentication import Credentials
from elastipod_operator import pod_control
from elastipod_operator.agents.agent_ports import agents_over
from elastipod_operator.agents.status_requests import open_session
from elastipod_operator.kube.api import Api
from elastipod_operator.kube.events import Events
from elastipod_operator.kube.job_keys import JobKeys
from elastipod_operator.kube.store import Store
from elastipod_operator.reconciler import Reconciler

JOB_KEYS = JobKeys((b"k" * 32,))


@pytest.fixture
async def shell(api: Api, server: ApiServer) -> AsyncIterator[Shell]:
    """A shell with an install key that knows no job."""
    store = Store()
    async with open_session() as session:
        reconciler = Reconciler(api, store, agents_over(session), Events(api), JOB_KEYS)
        yield Shell(reconciler, store, server)
        await reconciler.close()


def secret_of_pod(pod: dict[str, Any]) -> str:
    """Give the Secret to which a pod refers."""
    env = pod["spec"]["containers"][0]["env"]
    return next((e["valueFrom"]["secretKeyRef"]["name"] for e in env if e["name"] == "ELASTIPOD_KEY"), "")


async def test_the_secret_is_there_before_the_pods_that_need_it(shell: Shell) -> None:
    shell.submit()
    await settled(shell)
    (name,) = shell.server.secrets
    assert {secret_of_pod(pod) for pod in shell.server.pods.values()} == {name}
    posts = [what for method, what in shell.server.calls if method == "POST"]
    assert posts == ["secrets", *["pods"] * 4]


async def test_a_secret_that_is_there_already_is_left_as_it_is(shell: Shell) -> None:
    shell.submit()
    await settled(shell)
    (secret,) = shell.server.secrets.values()
    made = secret["metadata"]["resourceVersion"]
    gone = shell.server.pods.pop("job-workers-3")
    job = shell.store.drop_pod(gone)
    assert job is not None
    shell.reconciler.wake(job)
    await until(lambda: len(shell.server.pods) == 4)
    assert secret["metadata"]["resourceVersion"] == made


async def test_a_secret_that_somebody_deleted_while_pods_begin_is_created_again(shell: Shell) -> None:
    shell.submit()
    await settled(shell)
    made = dict(shell.server.secrets)
    shell.server.secrets.clear()
    pod = shell.server.pods["job-workers-0"]
    waiting = {"reason": "CreateContainerConfigError", "message": "secret not found"}
    pod["status"] = {"phase": "Pending", "containerStatuses": [container(waiting=waiting)]}
    job = shell.store.put_pod(shell.server.put(shell.server.pods, pod))
    assert job is not None
    shell.reconciler.wake(job)
    await until(lambda: set(shell.server.secrets) == set(made))


async def test_turned_off_there_is_neither_secret_nor_variable(shell: Shell) -> None:
    shell.submit({"elastipod": {"authentication": "Off", "growth": "Maximum"}})
    await settled(shell)
    assert shell.server.secrets == {}
    assert {secret_of_pod(pod) for pod in shell.server.pods.values()} == {""}


async def test_an_operator_that_may_not_create_secrets_says_so_and_tries_again(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_control, "REFUSAL_FIRST_S", 0.05)
    shell.server.refuse_secrets = (403, "secrets is forbidden")
    shell.submit()
    await until(lambda: shell.condition("PodsReady").get("reason") == "PodsRefused")
    told = shell.condition("PodsReady")["message"]
    assert "secrets is forbidden" in told
    assert "spec.elastipod.authentication to Off" in told
    assert shell.server.pods == {}
    shell.server.refuse_secrets = None
    await settled(shell)
    await until(lambda: shell.condition("PodsReady") == {})


async def ask_agent_at(shell: Shell, port: int) -> dict[str, str]:
    """Have the first pod's agent answer at a port; gives what the Secret of its job holds."""
    shell.submit({"elastipod": {"agentPort": port, "growth": "Maximum"}})
    await settled(shell)
    (secret,) = shell.server.secrets.values()
    pod = shell.server.pods["job-workers-0"]
    pod["status"] = {
        "phase": "Running",
        "podIP": "127.0.0.1",
        "containerStatuses": [container(running={"startedAt": CREATED})],
    }
    woken = shell.store.put_pod(shell.server.put(shell.server.pods, pod))
    assert woken is not None
    shell.reconciler.wake(woken)
    data: dict[str, str] = secret["stringData"]
    return data


async def test_agents_of_pods_with_a_key_are_asked_with_it(shell: Shell) -> None:
    agent = Agent(Credentials(key="to be known"))
    async with running(agent):
        data = await ask_agent_at(shell, agent.port)
        await until(lambda: shell.condition("PodsReady").get("reason") == "TokenRefused")
        await agent.stop()
        agent.held = Credentials(data["key"], data["token"], "job-workers-0")
        await agent.start()
        await until(lambda: not shell.condition("PodsReady"))


async def test_an_agent_of_the_previous_version_is_asked_with_the_token(shell: Shell) -> None:
    async with serving(FakeAgent()) as agent:
        agent.token = "to be known"
        agent.token = (await ask_agent_at(shell, agent.address.port))["token"]
        await until(lambda: f"Bearer {agent.token}" in agent.shown)
        assert set(agent.shown) == {None, f"Bearer {agent.token}"}
