"""The command line: `elastipod local ...`, also as `python -m elastipod_local ...`."""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable

from elastipod_local import binaries
from elastipod_local.addressing import MAX_NODES
from elastipod_local.cluster import Cluster
from elastipod_local.errors import LocalClusterError, UnsupportedError, what_the_machine_refused
from elastipod_local.host import Progress, require_linux, require_root, say, stop_signals_raise
from elastipod_local.images import ensure_images
from elastipod_local.kueue_config import KueueOptions
from elastipod_local.packages import ensure_packages
from elastipod_local.paths import DEFAULT_NAME, cluster_dir
from elastipod_local.state import NodeOptions, StateFile
from elastipod_local.teardown import is_running

# By the seconds that a cloud leaves: what announces there that a Spot machine is taken back.
SPOT_TAINTS = {120: "aws-node-termination-handler/spot-itn", 30: "cloud.google.com/impending-node-termination"}
EXIT_FAILED = 1
EXIT_UNSUPPORTED = 2
EXIT_INTERRUPTED = 130

DESCRIPTION = """\
A real multi-node Kubernetes cluster on this Linux machine, without Docker: etcd, API server, controller manager and scheduler,
and nodes, each with a kubelet, containerd and kube-proxy in its own namespaces. Needs root, except for --nodes 0."""

EXAMPLES = """\
examples:
  elastipod local up --nodes 2            start the cluster `default` (minutes the first time, then seconds)
  eval "$(elastipod local env)"           make kubectl and helm in this shell use it
  elastipod local node add                a third node
  elastipod local node kill node-1        power loss; `node return node-1` brings it back
  elastipod local node spot-notice node-1 announce a Spot interruption, and remove it 120 s later (`--seconds 30`: as on Google Cloud)
  elastipod local kueue                   install Kueue (or `up --kueue`)
  elastipod local images                  rebuild the images from the checkout and import them into running nodes
  elastipod local down                    stop and remove everything
"""


def main(argv: list[str]) -> int:
    """Run one command and give its exit code: 0, 1 failed, 2 wrong usage or a machine that cannot do it, 130 Ctrl-C."""
    arguments = _parser().parse_args(_shield_kubectl(argv))
    progress = _progress_to_stderr()
    try:
        with stop_signals_raise(KeyboardInterrupt):  # which takes down what an unfinished `up` has made
            require_linux()
            command: Callable[[argparse.Namespace, Progress], int] = arguments.command
            return command(arguments, progress)
    except UnsupportedError as problem:
        say(f"elastipod local: {problem}", sys.stderr)
        return EXIT_UNSUPPORTED
    except LocalClusterError as problem:
        say(f"elastipod local: {problem}", sys.stderr)
        return EXIT_FAILED
    except (OSError, subprocess.TimeoutExpired) as problem:
        say(f"elastipod local: {what_the_machine_refused(problem)}", sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        say("elastipod local: interrupted", sys.stderr)
        return EXIT_INTERRUPTED


def _shield_kubectl(argv: list[str]) -> list[str]:
    """Put `--` before kubectl's own arguments, so that its options are not taken for ours; our --name stands first."""
    if argv[:1] != ["kubectl"] or argv[1:2] in (["--help"], ["-h"]):
        return argv
    own = 3 if argv[1:2] == ["--name"] else 1
    return [*argv[:own], "--", *argv[own:]]


def _progress_to_stderr() -> Progress:
    began = time.monotonic()

    def show(text: str) -> None:
        say(f"[{time.monotonic() - began:5.1f} s] {text}", sys.stderr)

    return show


# --- commands ---


def _up(arguments: argparse.Namespace, progress: Progress) -> int:
    options = NodeOptions(cpus=arguments.node_cpus, memory_mib=arguments.node_memory, slots=arguments.slots)
    kueue = _kueue_options(arguments) if arguments.kueue else None
    Cluster.up(arguments.name, nodes=arguments.nodes, options=options, kueue=kueue, progress=progress)
    return 0


def _kueue(arguments: argparse.Namespace, progress: Progress) -> int:
    Cluster.attach(arguments.name, progress=progress).add_kueue(_kueue_options(arguments))
    return 0


def _kueue_options(arguments: argparse.Namespace) -> KueueOptions:
    return KueueOptions(frameworks=tuple(filter(None, arguments.kueue_frameworks.split(","))))


def _down(arguments: argparse.Namespace, progress: Progress) -> int:
    if not Cluster(arguments.name, cluster_dir(arguments.name), progress).down():
        print(f"there is no cluster {arguments.name!r}; nothing to do")
    return 0


def _status(arguments: argparse.Namespace, progress: Progress) -> int:
    folder = cluster_dir(arguments.name)
    state = StateFile(folder).load()
    if state is None:
        print(f"there is no cluster {arguments.name!r}")
        return EXIT_FAILED
    lives = is_running(state)
    print(f"cluster {state.name}: {state.phase if lives else 'not running (`elastipod local down` removes the rest)'}")
    print(f"  API server  {state.addressing.api_url}\n  kubeconfig  {folder / 'kubeconfig'}")
    print(f"  shared      {folder / 'shared'} (/mnt/shared on the nodes)\n  logs        {folder / 'logs'}")
    for role, process in state.control_plane.items():
        print(f"  {role:24} {'running' if process.is_alive() else 'ended'} (pid {process.pid})")
    for name, node in sorted(state.nodes.items(), key=lambda entry: entry[1].index):
        print(f"  {name:24} {node.phase} ({state.addressing.node_address(node.index)})")
    return 0 if lives else EXIT_FAILED


def _images(arguments: argparse.Namespace, progress: Progress) -> int:
    require_root("building images")
    cluster = Cluster(arguments.name, cluster_dir(arguments.name), progress)
    if cluster.is_running() and cluster.state().nodes:
        cluster.load_images()
        return 0
    ensure_packages(progress)
    for image in ensure_images(progress).images:
        print(f"{image.name} {image.digest}")
    return 0


def _kubectl(arguments: argparse.Namespace, progress: Progress) -> int:
    cluster = Cluster.attach(arguments.name)
    program = binaries.ensure(["kubectl"])["kubectl"]
    # In our place, so that Ctrl-C, terminals and exit codes are kubectl's own.
    os.execve(program, [str(program), *arguments.arguments], {**os.environ, **cluster.environment()})  # noqa: S606 - no shell is wanted


def _env(arguments: argparse.Namespace, progress: Progress) -> int:
    cluster = Cluster.attach(arguments.name)
    folders = dict.fromkeys(str(path.parent) for path in binaries.ensure(["kubectl", "helm"], progress).values())
    for name, value in cluster.environment().items():
        print(f"export {name}={shlex.quote(value)}")
    print(f'export PATH={":".join(map(shlex.quote, folders))}:"$PATH"')
    return 0


def _node(change: Callable[[Cluster, argparse.Namespace], None]) -> Callable[[argparse.Namespace, Progress], int]:
    """Make a command of a change of one or more nodes."""

    def command(arguments: argparse.Namespace, progress: Progress) -> int:
        require_root("changing nodes")
        change(Cluster.attach(arguments.name, progress=progress), arguments)
        return 0

    return command


def _add_nodes(cluster: Cluster, arguments: argparse.Namespace) -> None:
    print("\n".join(cluster.add_nodes(arguments.count)))


def _spot_notice(cluster: Cluster, arguments: argparse.Namespace) -> None:
    cluster.kubectl("taint", "node", arguments.node, "--overwrite", f"{SPOT_TAINTS[arguments.seconds]}=:NoSchedule")
    time.sleep(arguments.seconds)
    cluster.remove_node(arguments.node, drain=False)


NODE_COMMANDS: dict[str, tuple[str, Callable[[Cluster, argparse.Namespace], None]]] = {
    "remove": ("drain it, delete its Node object, stop it", lambda c, a: c.remove_node(a.node, drain=not a.no_drain)),
    "drain": ("cordon it and evict its pods", lambda c, a: c.drain_node(a.node)),
    "kill": ("power loss: kill all its processes at once, without notice", lambda c, a: c.kill_node(a.node)),
    "return": ("start a killed node again", lambda c, a: c.return_node(a.node)),
    "freeze": ("pause all its processes", lambda c, a: c.freeze_node(a.node)),
    "thaw": ("resume a frozen node", lambda c, a: c.thaw_node(a.node)),
    "partition": ("cut its network", lambda c, a: c.partition_node(a.node)),
    "heal": ("restore the network of a partitioned node", lambda c, a: c.heal_node(a.node)),
    "spot-notice": ("announce a Spot interruption of it as clouds do, then remove it without a drain", _spot_notice),
    "sicken": (
        "make a unit of its accelerator sick; label it as to be replaced",
        lambda c, a: c.set_sick(a.node, sick=True),
    ),
    "cure": ("cure its accelerator; label it as healthy", lambda c, a: c.set_sick(a.node, sick=False)),
}


# --- arguments ---


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elastipod local",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--name", default=DEFAULT_NAME, help="name of the cluster (default: %(default)s)")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, text: str, run: Callable[[argparse.Namespace, Progress], int]) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, parents=[common])
        added.set_defaults(command=run)
        return added

    up = command("up", "start a cluster", _up)
    up.add_argument("--nodes", type=_count(0), default=2, help="number of nodes; 0: control plane only (default: 2)")
    up.add_argument("--slots", type=_count(0), default=1, help="units of elastipod.io/slot on each node (default: 1)")
    up.add_argument("--node-cpus", type=float, metavar="CPUS", help="CPUs that a node offers (default: the machine's)")
    up.add_argument("--node-memory", type=int, metavar="MIB", help="memory that a node offers (default: the machine's)")
    up.add_argument("--kueue", action="store_true", help="install Kueue as well, webhooks included")
    kueue = command("kueue", "install Kueue in a running cluster, or restart it with other frameworks", _kueue)
    for added in (up, kueue):
        frameworks = "enabled integrations of Kueue, separated by commas, such as batch/job,pod (default: %(default)s)"
        added.add_argument("--kueue-frameworks", metavar="LIST", default="batch/job", help=frameworks)
    command("down", "stop the cluster and remove everything but its logs", _down)
    command("status", "show what is running", _status)
    command("images", "build the images from the checkout; import them into running nodes", _images)
    command("env", "print shell commands that make kubectl and helm use the cluster", _env)
    kubectl = command("kubectl", "run kubectl on the cluster", _kubectl)
    kubectl.add_argument("arguments", nargs="*", metavar="...", help="kubectl's own arguments")
    _add_node_commands(commands.add_parser("node", help="add, remove and drain nodes, or make them fail"), common)
    return parser


def _add_node_commands(node: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    changes = node.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add = changes.add_parser("add", help="add nodes", parents=[common])
    add.add_argument("count", nargs="?", type=_count(1), default=1, help="how many (default: 1)")
    add.set_defaults(command=_node(_add_nodes))
    for name, (text, change) in NODE_COMMANDS.items():
        added = changes.add_parser(name, help=text, description=text, parents=[common])
        added.add_argument("node", help="name of the node, such as node-1")
        if name == "remove":
            added.add_argument("--no-drain", action="store_true", help="do not evict its pods first")
        if name == "spot-notice":
            leads = "seconds from the notice to the removal: 120 as on AWS (the default), 30 as on Google Cloud"
            added.add_argument("--seconds", type=int, choices=SPOT_TAINTS, default=120, help=leads)
        added.set_defaults(command=_node(change))


def _count(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text) if text.isdigit() else -1
        if not least <= value <= MAX_NODES:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {MAX_NODES}")
        return value

    return number
