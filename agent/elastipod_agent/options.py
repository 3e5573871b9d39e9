"""The options of the command line: a table of torchrun's, and hyperpodrun's own.

torch's own parser would need an import of torch, which costs the agent of every pod seconds and hundreds of MiB. A test compares the
table with the parser of the installed torch. An option that only a newer torch has is looked up in a child process
(`torchrun.installed_options`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the table. Names have dashes; the spelling with underscores is always accepted too.

    unused: why the option has no effect inside a pod, else "". metavar: the name of its value in --help.
    """

    names: tuple[str, ...]
    default: Any = None
    kind: Callable[[str], Any] | None = str  # None: a flag that takes no value
    help: str = ""
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    unused: str = ""

    @property
    def dest(self) -> str:
        """The attribute that holds the parsed value."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def name(self) -> str:
        """The long name, with dashes."""
        return max(self.names, key=len)

    @property
    def spellings(self) -> list[str]:
        """All names, with dashes and with underscores."""
        long = [name for name in self.names if name.startswith("--")]
        underscored = ["--" + name[2:].replace("-", "_") for name in long]
        return [*self.names, *(name for name in underscored if name not in self.names)]


_RANKS = "the operator sets ranks, world size and master"
_NO_TORCH = "it names a class that needs torch in the agent's process"

TORCHRUN_OPTIONS = (
    Option(
        ("--nproc-per-node",),
        "1",
        metavar="N",
        help="workers per pod: auto, cpu, gpu, xpu or a number (default: $NPROC_PER_NODE or 1)",
    ),
    Option(("-m", "--module"), False, None, help="the script is a module; run it as python -m"),
    Option(("--no-python",), False, None, help="the script is a command; run it without python"),
    Option(("--run-path",), False, None, help="run the script with runpy.run_path in the worker's interpreter"),
    Option(
        ("--log-dir",), None, metavar="DIR", help="directory for error reports and the files of --redirects and --tee"
    ),
    Option(
        ("-r", "--redirects"),
        "0",
        metavar="STREAMS",
        help="streams to write to files only: 0 none, 1 stdout, 2 stderr, 3 both, or by local rank: 0:1,1:3",
    ),
    Option(("-t", "--tee"), "0", metavar="STREAMS", help="streams to write to files and to the console, same values"),
    Option(
        ("--log-line-prefix-template",),
        "",
        metavar="TEXT",
        help="prefix of worker lines; may use ${role_name}, ${rank}, ${local_rank} (default: [${role_name}${local_rank}]:)",
    ),
    Option(
        ("--local-ranks-filter",),
        "",
        metavar="RANKS",
        help="show only lines of these local ranks on the console, e.g. 0,1",
    ),
    Option(
        ("--duplicate-stdout-filters",),
        "",
        metavar="TEXTS",
        help="copy stdout lines that contain one of these texts, e.g. loss,error, to one file for all workers",
    ),
    Option(("--duplicate-stderr-filters",), "", metavar="TEXTS", help="the same for stderr"),
    Option(("--role",), "default", help="role of the workers, shown in the prefix of their lines"),
    Option(
        ("--rdzv-id",),
        "none",
        metavar="ID",
        help="run ID, set as TORCHELASTIC_RUN_ID in workers (default: the job's name)",
    ),
    Option(
        ("--virtual-local-rank",),
        False,
        None,
        help="each worker sees LOCAL_RANK=0 and only its own accelerator, as device 0",
    ),
    Option(
        ("--numa-binding",),
        None,
        choices=("node", "socket", "exclusive", "core-complex"),
        help="bind each worker to CPUs near its NVIDIA GPU: NUMA node, socket, exclusive cores of the node, one shared cache",
    ),
    Option(("--standalone",), False, None, help="run as torchrun on this machine only, even inside a pod"),
    Option(("--print-completion",), None, choices=("bash", "zsh", "tcsh"), help="print torchrun's shell completion"),
    Option(("--nnodes",), "1:1", metavar="N[:MAX]", help="number of pods; inside a pod the operator sets it"),
    Option(
        ("--rdzv-backend",), "static", metavar="NAME", help="rendezvous backend; inside a pod it is always hyperpod"
    ),
    Option(
        ("--max-restarts",),
        0,
        int,
        metavar="N",
        unused="the operator limits restarts (runPolicy.jobMaxRetryCount); workers only see the value",
    ),
    Option(
        ("--monitor-interval",),
        0.1,
        float,
        metavar="SECONDS",
        unused="the agent notices the exit of a worker at once, without polling",
    ),
    Option(
        ("--start-method",),
        "spawn",
        choices=("spawn", "fork", "forkserver"),
        unused="it applies to workers that are functions; these are commands",
    ),
    Option(
        ("--event-log-handler",), "null", metavar="NAME", unused=f"{_NO_TORCH}; see the agent's log and --metrics-port"
    ),
    Option(("--logs-specs",), None, metavar="NAME", unused=f"{_NO_TORCH}; use --log-dir, --redirects and --tee"),
    Option(
        ("--signals-to-handle",),
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="NAMES",
        unused="SIGTERM always starts a drain; SIGINT, SIGHUP and SIGQUIT end the run",
    ),
    Option(("--rdzv-endpoint",), "", metavar="HOST:PORT", unused=_RANKS),
    Option(("--rdzv-conf",), "", metavar="KEY=VALUE,...", unused=_RANKS),
    # No numbers: $RANK of another operator's pods is empty or unknown in ours, and nobody looks at them.
    Option(("--node-rank",), 0, metavar="N", unused=_RANKS),
    Option(("--master-addr",), "127.0.0.1", metavar="HOST", unused=_RANKS),
    Option(("--master-port",), None, metavar="PORT", unused=_RANKS),
    Option(("--local-addr",), None, metavar="HOST", unused=_RANKS),
)
OWN_OPTIONS = (
    Option(
        ("--shutdown-signal",),
        "SIGKILL",
        choices=("SIGKILL", "SIGTERM"),
        help="signal that ends workers in a hard stop (default: SIGKILL)",
    ),
    Option(("--shutdown-timeout",), 15, int, metavar="SECONDS", help="time from that signal to SIGKILL (default: 15)"),
    Option(
        ("--pre-train-script",),
        None,
        metavar="FILE",
        help="script to run before every start of the workers; if it fails, the start is a fault",
    ),
    Option(("--pre-train-args",), "", metavar="TEXT", help="its arguments, as one string"),
    Option(("--post-train-script",), None, metavar="FILE", help="script to run once all workers have completed"),
    Option(("--post-train-args",), "", metavar="TEXT", help="its arguments, as one string"),
    Option(
        ("--inprocess-restart",),
        False,
        None,
        help="start workers before the first /start and keep them after faults; they wait at a barrier for the next start",
    ),
    Option(
        ("--inprocess-timeout",),
        None,
        int,
        metavar="SECONDS",
        help="time for all workers to reach that barrier before they are restarted (default: $INPROCESS_RESTART_TIMEOUT or 600)",
    ),
    Option(
        ("--no-warm-workers",),
        False,
        None,
        help="start each worker in a new interpreter instead of forking it from one that has torch loaded",
    ),
    Option(
        ("--preload",),
        "",
        metavar="MODULES",
        help="modules to import before workers are forked, in addition to torch, e.g. transformers,timm",
    ),
    Option(
        ("--hang-timeout",),
        "auto",
        metavar="SECONDS",
        help="time without a new step after which a worker that reports steps is reported as a fault, with its stacks; 0 = never "
        "(default: auto = 10 times the usual interval between reports, at least 600); counts from the start of a generation for a process "
        "that has reported in an earlier one",
    ),
    Option(
        ("--server-host",), "", metavar="HOST", help="address of the control server (default: all, of IPv4 and IPv6)"
    ),
    Option(("--server-port",), None, int, metavar="PORT", help="its port (default: $ELASTIPOD_AGENT_PORT or 8080)"),
    Option(
        ("--server-log-level",),
        "info",
        str.lower,
        choices=("critical", "error", "warning", "info", "debug", "trace"),
        metavar="LEVEL",
        help="log level of the control server: refused calls at info, every call at debug (default: info)",
    ),
    Option(
        ("--server-shutdown-timeout",),
        300,
        int,
        metavar="SECONDS",
        help="limit for the shutdown of the agent (default: 300)",
    ),
    Option(("--metrics-port",), 0, int, metavar="PORT", help="port of the Prometheus metrics; 0 = none (default: 0)"),
)
