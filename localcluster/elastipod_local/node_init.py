"""Process 1 of a node, inside its namespaces: gives the node a root of its own and keeps its services running.

`python -m elastipod_local.node_init CONFIG` is started by `node.Node.start` with new network, mount, pid, uts, ipc and
cgroup namespaces. The node's root is an overlay of the machine's, its upper half in memory: whatever a node or a
privileged pod writes outside the folders of NODE_FOLDERS never reaches the machine and is gone with the node.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from elastipod_local.host import OPEN_UMASK, run, tool_environment, wait_until
from elastipod_local.node_config import NODE_FOLDERS, RUNTIME_ENDPOINT, SHARED_MOUNT, InitConfig

CONNECTED_DEADLINE_S = 60
CONTAINERD_DEADLINE_S = 60
RESTART_DELAY_S = 1.0

# kubelet sets these for the whole machine: it finds what it wants here, and the machine keeps its own.
SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


def mount(source: str | Path, target: str | Path, *options: str) -> None:
    """Mount something, making its place first."""
    Path(target).mkdir(parents=True, exist_ok=True)
    run(["mount", *options, source, target])


def log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def enter_own_root(config: InitConfig) -> None:
    """Put an overlay in place of the machine's root; all mounts are seen by this node alone."""
    run(["mount", "--make-rprivate", "/"])
    node = Path(config.folder)
    stage = node / "root"
    mount("node", stage, "-t", "tmpfs", "-o", "mode=755")
    for name in ("upper", "work", "merged"):
        (stage / name).mkdir()
    root = stage / "merged"
    mount("node", root, "-t", "overlay", "-o", f"lowerdir=/,upperdir={stage}/upper,workdir={stage}/work")
    mount("/dev", root / "dev", "--rbind")
    mount("proc", root / "proc", "-t", "proc")
    mount("sysfs", root / "sys", "-t", "sysfs")
    mount("run", root / "run", "-t", "tmpfs", "-o", "mode=755")
    mount("tmp", root / "tmp", "-t", "tmpfs", "-o", "mode=1777")
    for folder in config.visible:  # last: a checkout may lie below /tmp
        show(folder, root)
    for name, place in NODE_FOLDERS.items():
        mount(node / name, f"{root}{place}", "--bind")
    mount(config.logs, root / "var/log", "--bind")
    mount(config.shared, f"{root}{SHARED_MOUNT}", "--bind")
    (root / "old-root").mkdir()
    run(["pivot_root", root, root / "old-root"])
    os.chdir("/")
    run(["umount", "--lazy", "/old-root"])
    Path("/old-root").rmdir()
    # Volumes and containers are mounted by one service and must be seen by the others.
    run(["mount", "--make-rshared", "/"])


def show(folder: str, root: Path) -> None:
    """Show a folder of the machine in the node's root at the same path, read-only.

    What is mounted over a link lands where the link leads, which is outside of that root: so it is mounted at its real path.
    """
    real = Path(folder).resolve()
    mount(real, f"{root}{real}", "--rbind", "-o", "ro")
    name = Path(f"{root}{folder}")
    if str(real) != folder and not name.is_symlink() and not name.exists():
        name.parent.mkdir(parents=True, exist_ok=True)
        name.symlink_to(real)


def mount_cgroups(config: InitConfig) -> None:
    """Mount the machine's hierarchies; thanks to the cgroup namespace each shows the node's group as its root."""
    if all(kind == "cgroup2" for _, kind, _ in config.cgroups):
        mount("cgroup2", "/sys/fs/cgroup", "-t", "cgroup2")
        _leave_root_group(Path("/sys/fs/cgroup"))
        return
    mount("cgroup", "/sys/fs/cgroup", "-t", "tmpfs", "-o", "mode=755")
    for point, kind, options in config.cgroups:
        mount("cgroup", point, "-t", kind, *(["-o", options] if options else []))


def _leave_root_group(root: Path) -> None:
    """Under v2 only a group without processes of its own can share out its controllers to those below it."""
    own = root / "init"
    own.mkdir(exist_ok=True)
    for pid in (root / "cgroup.procs").read_text().split():
        (own / "cgroup.procs").write_text(pid)
    for controller in (root / "cgroup.controllers").read_text().split():
        (root / "cgroup.subtree_control").write_text(f"+{controller}")


def shield_sysctls() -> None:
    """Show this node files of its own in place of the machine-wide sysctls that kubelet would change."""
    for name, value in SYSCTLS.items():
        target = Path("/proc/sys") / name
        if target.exists():
            own = Path("/run/sysctl") / name
            own.parent.mkdir(parents=True, exist_ok=True)
            own.write_text(f"{value}\n")
            run(["mount", "--bind", own, target])
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")  # of this network namespace


def wait_connected() -> None:
    """Wait for the node's wire: the default route is the last thing that it gets, after all else is in its place."""

    def has_default_route() -> bool:
        lines = Path("/proc/net/route").read_text().splitlines()[1:]
        return any(line.split()[1] == "00000000" for line in lines)

    wait_until(has_default_route, deadline_s=CONNECTED_DEADLINE_S, what="the node's network")


class Services:
    """The node's services, each restarted when it ends, as by a service manager."""

    def __init__(self, commands: dict[str, list[str]]) -> None:
        self._commands = commands
        self._running: dict[int, str] = {}

    def start(self, name: str) -> None:
        with Path(f"/var/log/{name}.log").open("ab") as file:
            child = subprocess.Popen(
                self._commands[name], stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=tool_environment()
            )
        child.returncode = 0  # this process reaps for the whole namespace; Popen must not wait for it as well
        self._running[child.pid] = name
        log(f"{name} started")

    def run_for_ever(self) -> None:
        """Reap processes that end in the namespace and restart services."""
        while True:
            pid, status = os.wait()
            if name := self._running.pop(pid, None):
                log(f"{name} ended ({os.waitstatus_to_exitcode(status)}); restarting it")
                time.sleep(RESTART_DELAY_S)
                self.start(name)


def main(config_file: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(OPEN_UMASK)  # the services inherit it, and write files of pods
    config = InitConfig.decode(Path(config_file).read_text())
    socket.sethostname(config.node)
    enter_own_root(config)
    shield_sysctls()
    wait_connected()
    mount_cgroups(config)
    log("the node's root and network are there")
    services = Services(config.commands)
    services.start("containerd")
    wait_until(_containerd_answers, deadline_s=CONTAINERD_DEADLINE_S, what="containerd to answer")
    for name in config.commands:
        if name != "containerd":
            services.start(name)
    services.run_for_ever()


def _containerd_answers() -> bool:
    return Path(RUNTIME_ENDPOINT).exists() and run(["ctr", "version"], check=False).returncode == 0


if __name__ == "__main__":
    main(sys.argv[1])
