"""What workers say over the socket, as the agent's status and its faults show it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.patience import PATIENCE_S

from elastipod.ipc.protocol import RestartMode
from elastipod_agent.core.worker_env import Layout
from elastipod_agent.generation.faults import Fault
from elastipod_agent.ipc import link as link_module
from elastipod_agent.ipc.link import SOCKET_NAME, WorkerLink
from elastipod_agent.ipc.run_coordinator import ReportedFault
from elastipod_agent.status import StatusStore

LAYOUT = Layout(nproc=2, run_id="x", role="default", max_restarts=0)


class Linked:
    """A link, the status that it writes to, and the faults that it passed on."""

    def __init__(self, folder: Path) -> None:
        self.status = StatusStore(lambda: "now")
        self.faults: list[Fault] = []
        self.link = WorkerLink(LAYOUT, {}, folder, self.status, self.faults.append)


async def test_reports_are_collected_and_shown_together(tmp_path: Path) -> None:
    linked = Linked(tmp_path)
    link, status = linked.link, linked.status
    before = status.current.version
    link.coordinator.store_labels(0, {"zone": "a"})
    link.coordinator.store_labels(0, {"zone": "b"})
    link.coordinator.store_data(1, {"step": 7})
    assert status.current.version == before, "nothing is shown at once"
    await asyncio.wait_for(status.wait_beyond(before, PATIENCE_S), PATIENCE_S)
    assert status.current.version == before + 1, "three reports are one change"
    assert status.current.rank_labels == link.coordinator.labels() != {}
    assert status.current.worker_data == link.coordinator.worker_data()
    assert len(status.current.worker_data) == 1
    link.coordinator.store_labels(0, {"zone": "c"})
    await asyncio.wait_for(status.wait_beyond(before + 1, PATIENCE_S), PATIENCE_S)
    assert status.current.rank_labels == link.coordinator.labels()


async def test_what_workers_report_has_its_place_in_the_status(tmp_path: Path) -> None:
    linked = Linked(tmp_path)
    fields = linked.link.reported()
    linked.status.set(**fields)  # raises for a name that the status has not
    assert {"worker_data", "rank_labels", "progress"} <= set(fields)


async def test_a_reported_fault_is_passed_on_with_its_rank_and_what_it_asks_for(tmp_path: Path) -> None:
    linked = Linked(tmp_path)
    sent = ReportedFault(
        local_rank=1,
        global_rank=5,
        reason="Diverged",
        message="loss is NaN",
        restart_mode=RestartMode.IN_PROCESS_RESTART,
    )
    linked.link._on_reported_fault(sent)
    (fault,) = linked.faults
    failure = fault.failure
    assert (fault.reason, fault.restart_mode) == ("Diverged", RestartMode.IN_PROCESS_RESTART)
    assert (failure.global_rank, failure.local_rank, failure.message) == (5, 1, "loss is NaN")
    assert (failure.exitcode, failure.signal) == (None, None)
    assert failure.time.endswith("Z")


async def test_the_socket_is_in_the_agents_folder_and_nothing_is_shown_after_the_end(tmp_path: Path) -> None:
    linked = Linked(tmp_path)
    await linked.link.listen()
    assert (tmp_path / SOCKET_NAME).is_socket()
    version = linked.status.current.version
    linked.link.coordinator.store_labels(0, {"zone": "a"})
    await linked.link.close()
    await asyncio.sleep(2 * link_module.REPORT_DELAY_S)
    assert linked.status.current.version == version
    await Linked(tmp_path / "unused").link.close()  # one that never listened
