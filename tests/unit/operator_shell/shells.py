"""A reconciler with its store, fed by hand in place of watches, for tests of what it does about one job."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from tests.unit.agents.fake_agent import until
from tests.unit.kube.bodies import JOB_UID, job_body
from tests.unit.operator_shell.api_server import ApiServer

from elastipod_operator.agents.agent_ports import agents_over
from elastipod_operator.agents.status_requests import open_session
from elastipod_operator.core.snapshot import Snapshot
from elastipod_operator.kube.api import Api
from elastipod_operator.kube.events import Events
from elastipod_operator.kube.store import Store
from elastipod_operator.reconciler import Reconciler

Body = dict[str, Any]


class Shell:
    """A reconciler with its store, fed by hand in place of watches."""

    def __init__(self, reconciler: Reconciler, store: Store, server: ApiServer) -> None:
        self.reconciler, self.store, self.server = reconciler, store, server

    def watch_shows(self, job: Body) -> None:
        job = copy.deepcopy(job)
        if self.store.put_job(job):
            self.reconciler.wake(job["metadata"]["uid"])

    def submit(self, spec: Body | None = None, **meta: Any) -> None:
        """Create a job and let the watch tell."""
        self.watch_shows(self.server.put(self.server.jobs, job_body(spec, **meta)))

    def state(self) -> Body:
        """Give the last condition of the job, as the API server has it."""
        conditions = self.server.jobs["job"].get("status", {}).get("conditions", [{}])
        last: Body = conditions[-1]
        return last

    def condition(self, kind: str) -> Body:
        conditions = self.server.jobs["job"].get("status", {}).get("conditions", ())
        return next((c for c in conditions if c["type"] == kind), {})


@contextlib.asynccontextmanager
async def open_shell(api: Api, server: ApiServer, **let_go: Any) -> AsyncIterator[Shell]:
    """A shell that knows no job. let_go: which jobs it runs, and who takes over the others."""
    store = Store()
    async with open_session() as session:
        reconciler = Reconciler(api, store, agents_over(session), Events(api), **let_go)
        yield Shell(reconciler, store, server)
        await reconciler.close()


class Decisions(list[Snapshot]):
    """What was decided on so far. `fail`: raise so many times first."""

    fail = 0


async def settled(shell: Shell) -> None:
    await until(lambda: len(shell.server.pods) == 4 and bool(shell.state()) and "status" in shell.server.jobs["job"])


async def decide_again(shell: Shell, decisions: Decisions) -> None:
    """Have one more decision made and carried out: that it was is known when the one after it begins."""
    for _ in range(2):
        made = len(decisions)
        shell.reconciler.wake(JOB_UID)
        await until(partial(_is_longer, decisions, made))


def _is_longer(decisions: Decisions, number: int) -> bool:
    return len(decisions) > number
