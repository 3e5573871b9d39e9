"""Failures of the control plane of a running cluster: one of its processes hangs, dies, and is restarted."""

import signal

from elastipod_local.controlplane import SERVING, ControlPlane
from elastipod_local.errors import LocalClusterError
from elastipod_local.host import wait_until
from elastipod_local.processes import ProcessId, kill_if_tagged, reap
from elastipod_local.state import StateFile

DEATH_DEADLINE_S = 20
STOP_DEADLINE_S = 5


class Roles:
    """The processes of one cluster's control plane, by role. Hold the cluster's lock around every call."""

    def __init__(self, files: StateFile, control_plane: ControlPlane) -> None:
        self._files = files
        self._control_plane = control_plane

    def freeze(self, role: str) -> None:
        """Freeze the role's process; returns when it is frozen.

        Raises LocalClusterError when there is no such role or it does not run.
        """
        process = self._signal(role, signal.SIGSTOP)
        wait_until(process.is_stopped, deadline_s=STOP_DEADLINE_S, what=f"{role} to hang", every_s=0.002)

    def thaw(self, role: str) -> None:
        """Resume the role's process."""
        self._signal(role, signal.SIGCONT)

    def kill(self, role: str) -> None:
        """End it at once, frozen or not; returns when it is dead."""
        process = self._signal(role, signal.SIGKILL)

        def is_dead() -> bool:
            reap()
            return not process.is_alive()

        wait_until(is_dead, deadline_s=DEATH_DEADLINE_S, what=f"{role} to end", every_s=0.02)

    def start(self, role: str) -> None:
        """Start it again with its data as they are; returns when the API server is ready, at once while that or etcd is dead."""
        if self._process(role).is_alive():
            raise LocalClusterError(f"{role} runs already")
        process = self._control_plane.start(role)
        state = self._files.update(lambda state: state.with_process(role, process))
        # The others may have been killed too, and are to stay so.
        if all(state.control_plane[name].is_alive() for name in SERVING if name != role):
            self._control_plane.wait_ready({name: state.control_plane[name] for name in (*SERVING, role)})

    def _signal(self, role: str, signum: signal.Signals) -> ProcessId:
        process = self._process(role)
        if not process.is_alive() or not kill_if_tagged(process.pid, self._files.folder, signum):
            raise LocalClusterError(f"{role} does not run")
        return process

    def _process(self, role: str) -> ProcessId:
        running = self._files.read().control_plane
        if role not in running:
            raise LocalClusterError(f"there is no role {role!r}; there are: {', '.join(running) or 'none'}")
        return running[role]
