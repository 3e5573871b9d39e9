"""Programs that only tests need, built from Go modules in `tests/go`."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from elastipod_local import binaries, gobuild
from elastipod_local.binaries import KUBERNETES
from elastipod_local.gobuild import GoModule
from elastipod_local.host import Progress, quiet
from elastipod_local.versions import KUBERNETES_VERSION, KUEUE_VERSION

FOLDER = Path(__file__).resolve().parent / "go"
PREFIX = "kubernetes-"


@dataclass(frozen=True, slots=True)
class ModuleOfTests(GoModule):
    """A folder `tests/go/<name>` and what is built from it."""

    @property
    def folder(self) -> Path:
        return FOLDER / self.name


def program(name: str) -> Path:
    """Give the one program of a folder with a main.go, built once."""
    digest = hashlib.sha256((FOLDER / name / "main.go").read_bytes()).hexdigest()[:16]
    module = ModuleOfTests(name, f"-s -w -X main.source={digest}", {name: f"elastipod.io/tests/{name}"})
    return gobuild.build(module, [name]) / name


@dataclass(frozen=True, slots=True)
class ClusterVersions:
    """Kubernetes and Kueue of other versions than the local cluster's, as one module pins them."""

    minor: str
    kubernetes: str
    kueue: str

    @classmethod
    def of(cls, minor: str) -> ClusterVersions:
        """Read them. Raises ValueError for a minor version that is not there."""
        if minor not in offered_minors():
            raise ValueError(f"tests/go has no Kubernetes {minor}; it has {', '.join(offered_minors())}")
        text = (FOLDER / f"{PREFIX}{minor}" / "go.mod").read_text(encoding="utf-8")
        found = {name: version for name, version in re.findall(r"^(?:require |\s)(\S+) (v\S+)", text, re.MULTILINE)}
        return cls(minor, found["k8s.io/kubernetes"], found["sigs.k8s.io/kueue"])

    def module(self) -> ModuleOfTests:
        flags = KUBERNETES.flags.replace(KUBERNETES_VERSION, self.kubernetes).replace(KUEUE_VERSION, self.kueue)
        ours, theirs = (version.split(".")[1] for version in (KUBERNETES_VERSION, self.kubernetes))
        flags = flags.replace(f"gitMinor={ours}", f"gitMinor={theirs}")
        return ModuleOfTests(f"{PREFIX}{self.minor}", flags, KUBERNETES.packages, KUBERNETES.beside)

    def use(self) -> None:
        """Let local clusters of this process be made of them. They are built first: minutes, the first time."""
        module, others = self.module(), binaries.ensure

        def ensure(names: list[str], progress: Progress = quiet) -> dict[str, Path]:
            wanted = list(dict.fromkeys(names))
            folder = gobuild.build(module, module.packages, progress)
            found = others([name for name in wanted if name not in module.packages], progress)
            return {name: found.get(name, folder / name) for name in wanted}

        binaries.ensure = ensure  # type: ignore[assignment]


def offered_minors() -> list[str]:
    """Give the other minor versions of Kubernetes for which there is a module."""
    return sorted(path.name.removeprefix(PREFIX) for path in FOLDER.glob(f"{PREFIX}*"))
