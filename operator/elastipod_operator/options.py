"""The operator's command line and environment."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from .kube.node_signals import SignalEffect, parse_signals
from .kube.scope import Scope


@dataclass(frozen=True, slots=True)
class Options:
    """The settings from the command line and the pod's environment."""

    namespaces: tuple[str, ...]
    metrics_port: int
    log_level: str
    pod_name: str
    pod_namespace: str
    is_pod: bool = False
    install_key_file: str = ""
    webhook_port: int = 0
    webhook_name: str = "127.0.0.1"
    webhook_certificates: str = ""
    webhook_configuration: str = ""
    release: str = ""
    controller: str = "elastipod"
    only_named: bool = False
    takes_over: bool = False
    node_signals: Mapping[str, SignalEffect] = field(default_factory=dict)

    @property
    def scope(self) -> Scope:
        """Which jobs this operator runs."""
        return Scope(self.release, self.namespaces, self.controller, self.only_named)


def parse(argv: list[str] | None) -> Options:
    """Read the command line; defaults come from the environment that the chart sets."""
    env = os.environ
    parser = argparse.ArgumentParser(
        prog="elastipod operator",
        description="Run the Elastipod operator, which watches HyperPodPyTorchJobs and manages their pods and workers. It uses "
        "the pod's service account, or the current kubeconfig outside of a cluster.",
    )
    parser.add_argument(
        "--namespaces",
        default=env.get("WATCH_NAMESPACES", ""),
        help="comma-separated namespaces to watch; empty means all (default: $WATCH_NAMESPACES)",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=int(env.get("METRICS_PORT", "8081")),
        help="port of /healthz, /readyz and /metrics; 0 disables the endpoint (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        default=env.get("LOG_LEVEL", "info"),
        choices=("debug", "info", "warning", "error"),
        help="lowest level of log lines, which are JSON objects (default: %(default)s)",
    )
    parser.add_argument(
        "--install-key-file",
        default=env.get("ELASTIPOD_INSTALL_KEY_FILE", ""),
        help="file with the key from which the jobs' keys are derived; empty: no authentication (default: $ELASTIPOD_INSTALL_KEY_FILE)",
    )
    parser.add_argument(
        "--node-signals",
        type=parse_signals,
        default=env.get("ELASTIPOD_NODE_SIGNALS", ""),
        help="responses to node announcements that differ from the default, such as `drain condition GpuUnhealthy=True, ignore taint KEY` "
        "(default: $ELASTIPOD_NODE_SIGNALS)",
    )
    _add_webhook(parser)
    _add_controller(parser)
    args = parser.parse_args(argv)
    if args.webhook_port and not (args.webhook_certificates or args.install_key_file):
        parser.error(
            "--webhook-port needs --install-key-file, from which the webhook's certificates are derived, or --webhook-certificates"
        )
    return Options(
        namespaces=tuple(name.strip() for name in args.namespaces.split(",") if name.strip()),
        metrics_port=args.metrics_port,
        log_level=args.log_level,
        # Two operators started by hand on one machine are different holders of the lease.
        pod_name=env.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
        pod_namespace=env.get("POD_NAMESPACE", "default"),
        is_pod=bool(env.get("POD_NAME")),
        install_key_file=args.install_key_file,
        release=env.get("RELEASE_NAME", ""),
        controller=args.controller_name,
        only_named=args.only_named,
        takes_over=args.take_over,
        node_signals=args.node_signals,
        webhook_port=args.webhook_port,
        webhook_name=args.webhook_name,
        webhook_certificates=args.webhook_certificates,
        webhook_configuration=args.webhook_configuration,
    )


def _add_webhook(parser: argparse.ArgumentParser) -> None:
    env = os.environ
    parser.add_argument(
        "--webhook-port",
        type=int,
        default=int(env.get("WEBHOOK_PORT", "0")),
        help="port of the admission webhook, which warns about jobs when they are applied; 0 disables it (default: %(default)s)",
    )
    parser.add_argument(
        "--webhook-name",
        default=env.get("WEBHOOK_NAME", "127.0.0.1"),
        help="host in the webhook's URL, for which its certificates are issued (default: %(default)s)",
    )
    parser.add_argument(
        "--webhook-certificates",
        default=env.get("WEBHOOK_CERTIFICATES", ""),
        help="folder with tls.crt and tls.key, renewed by another program; empty: the operator issues certificates itself",
    )
    parser.add_argument(
        "--webhook-configuration",
        default=env.get("WEBHOOK_CONFIGURATION", ""),
        help="ValidatingWebhookConfiguration in which the leader keeps the authority of its own certificates; empty: none",
    )


def _add_controller(parser: argparse.ArgumentParser) -> None:
    env = os.environ
    parser.add_argument(
        "--controller-name",
        default=env.get("ELASTIPOD_CONTROLLER_NAME") or "elastipod",
        help="run jobs whose annotation elastipod.io/controller has this value, and those without it (default: %(default)s)",
    )
    parser.add_argument(
        "--only-named",
        action="store_true",
        default=env.get("ELASTIPOD_ONLY_NAMED") == "true",
        help="leave jobs without that annotation to another controller (default: whether $ELASTIPOD_ONLY_NAMED is true)",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        default=env.get("ELASTIPOD_TAKE_OVER") == "true",
        help="run even if the CRD belongs to another controller that no longer runs (default: whether $ELASTIPOD_TAKE_OVER is true)",
    )
