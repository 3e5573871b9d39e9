"""The options of the command line: torchrun's, which stand here as a table, and our own.

Asking torch for its parser means importing torch, which would cost the agent of every pod hundreds of MiB and seconds. A
test compares the table with the installed torch's own parser; and an option that only a newer torch knows is learned from
that torch in a child process (`torchrun.installed_options`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the table. Names carry dashes; the spelling with underscores is always accepted too.

    unused: why it changes nothing inside a pod; "" for an option that is obeyed there. metavar: its value in --help.
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
        """The attribute under which the parsed value is found."""
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


_RANKS = "ranks, world size and master come from the operator"
_NO_TORCH = "it names a class that would need torch in the agent's process"

TORCHRUN_OPTIONS = (
    Option(
        ("--nproc-per-node",),
        "1",
        metavar="N",
        help="workers per pod: auto, cpu, gpu, xpu or a number (default: $NPROC_PER_NODE or 1)",
    ),
    Option(("-m", "--module"), False, None, help="the script is a module, run as python -m"),
    Option(("--no-python",), False, None, help="the script is a command of its own, run without python"),
    Option(("--run-path",), False, None, help="run the script with runpy.run_path in the worker's interpreter"),
    Option(("--log-dir",), None, metavar="DIR", help="where files of --redirects, --tee and error reports go"),
    Option(
        ("-r", "--redirects"),
        "0",
        metavar="STREAMS",
        help="streams into files only: 0 none, 1 out, 2 err, 3 both, or by local rank like 0:1,1:3",
    ),
    Option(("-t", "--tee"), "0", metavar="STREAMS", help="streams into files and to the console, values as above"),
    Option(
        ("--log-line-prefix-template",),
        "",
        metavar="TEXT",
        help="prefix of worker lines with ${role_name}, ${rank}, ${local_rank} (default: [${role_name}${local_rank}]:)",
    ),
    Option(
        ("--local-ranks-filter",), "", metavar="RANKS", help="only these local ranks' lines go to the console, e.g. 0,1"
    ),
    Option(
        ("--duplicate-stdout-filters",),
        "",
        metavar="TEXTS",
        help="copy lines of standard output with one of these texts, e.g. loss,error, into a file of all workers",
    ),
    Option(("--duplicate-stderr-filters",), "", metavar="TEXTS", help="the same for standard error"),
    Option(("--role",), "default", help="role of the workers, part of the prefix of their lines"),
    Option(
        ("--rdzv-id",), "none", metavar="ID", help="run id that workers see in TORCHELASTIC_RUN_ID (default: the job)"
    ),
    Option(
        ("--virtual-local-rank",),
        False,
        None,
        help="every worker sees LOCAL_RANK=0 and its own accelerator alone, as device 0",
    ),
    Option(
        ("--numa-binding",),
        None,
        choices=("node", "socket", "exclusive", "core-complex"),
        help="bind each worker to CPUs near its NVIDIA GPU: of its NUMA node, its socket, a share of its own, one cache",
    ),
    Option(("--standalone",), False, None, help="be torchrun on this machine alone, also inside a pod"),
    Option(("--print-completion",), None, choices=("bash", "zsh", "tcsh"), help="print torchrun's shell completion"),
    Option(("--nnodes",), "1:1", metavar="N[:MAX]", help="number of pods; inside a pod the operator says it"),
    Option(
        ("--rdzv-backend",),
        "static",
        metavar="NAME",
        help="rendezvous backend; inside a pod it is hyperpod, whatever is given",
    ),
    Option(
        ("--max-restarts",),
        0,
        int,
        metavar="N",
        unused="the operator decides about restarts (runPolicy.jobMaxRetryCount), workers only see the value",
    ),
    Option(
        ("--monitor-interval",),
        0.1,
        float,
        metavar="SECONDS",
        unused="the end of a worker is noticed at once, not by polling",
    ),
    Option(
        ("--start-method",),
        "spawn",
        choices=("spawn", "fork", "forkserver"),
        unused="it is for workers that are functions, and these are commands",
    ),
    Option(
        ("--event-log-handler",), "null", metavar="NAME", unused=f"{_NO_TORCH}; see the agent's log and --metrics-port"
    ),
    Option(("--logs-specs",), None, metavar="NAME", unused=f"{_NO_TORCH}; use --log-dir, --redirects and --tee"),
    Option(
        ("--signals-to-handle",),
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="NAMES",
        unused="SIGTERM always begins a drain, and SIGINT, SIGHUP and SIGQUIT end the run",
    ),
    Option(("--rdzv-endpoint",), "", metavar="HOST:PORT", unused=_RANKS),
    Option(("--rdzv-conf",), "", metavar="KEY=VALUE,...", unused=_RANKS),
    Option(("--node-rank",), 0, int, metavar="N", unused=_RANKS),
    Option(("--master-addr",), "127.0.0.1", metavar="HOST", unused=_RANKS),
    Option(("--master-port",), None, int, metavar="PORT", unused=_RANKS),
    Option(("--local-addr",), None, metavar="HOST", unused=_RANKS),
)
OWN_OPTIONS = (
    Option(
        ("--shutdown-signal",),
        "SIGKILL",
        choices=("SIGKILL", "SIGTERM"),
        help="what ends workers in a stop that is no drain (default: SIGKILL)",
    ),
    Option(("--shutdown-timeout",), 15, int, metavar="SECONDS", help="from that signal to SIGKILL (default: 15)"),
    Option(
        ("--pre-train-script",),
        None,
        metavar="FILE",
        help="run before the workers at every start; its failure is a fault",
    ),
    Option(("--pre-train-args",), "", metavar="TEXT", help="its arguments, in one string"),
    Option(("--post-train-script",), None, metavar="FILE", help="run once all workers have completed"),
    Option(("--post-train-args",), "", metavar="TEXT", help="its arguments, in one string"),
    Option(
        ("--inprocess-restart",),
        False,
        None,
        help="start the workers at once and keep them over faults: they wait at a barrier for the next start",
    ),
    Option(
        ("--inprocess-timeout",),
        600,
        int,
        metavar="SECONDS",
        help="that all workers may take to come (back) to that barrier before they are started anew (default: 600)",
    ),
    Option(
        ("--no-warm-workers",),
        False,
        None,
        help="start every worker with a fresh interpreter instead of forking one that has torch loaded",
    ),
    Option(
        ("--preload",),
        "",
        metavar="MODULES",
        help="what warm workers have imported already, beside torch, e.g. transformers,timm",
    ),
    Option(
        ("--hang-timeout",),
        "auto",
        metavar="SECONDS",
        help="silence after which workers that report steps are a fault, with their stacks; 0 = never "
        "(default: auto = 10 times the usual time between reports, at least 600)",
    ),
    Option(("--server-host",), "0.0.0.0", metavar="HOST", help="address of the control server (default: 0.0.0.0)"),  # noqa: S104 the operator calls from another pod
    Option(("--server-port",), None, int, metavar="PORT", help="its port (default: $ELASTIPOD_AGENT_PORT or 8080)"),
    Option(
        ("--server-log-level",),
        "info",
        str.lower,
        choices=("critical", "error", "warning", "info", "debug", "trace"),
        metavar="LEVEL",
        help="what it logs: refused calls from info on, every call from debug on (default: info)",
    ),
    Option(
        ("--server-shutdown-timeout",), 300, int, metavar="SECONDS", help="that leaving may take at most (default: 300)"
    ),
    Option(("--metrics-port",), 0, int, metavar="PORT", help="port of the Prometheus metrics; 0 = none (default: 0)"),
)
