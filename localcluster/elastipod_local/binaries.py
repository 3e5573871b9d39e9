"""The programs of Kubernetes: found where they are, else built once from the Go modules in this package.

What is built lies in `$XDG_CACHE_HOME/elastipod/bin/<hash of the module>`; two callers at a time do not build twice.
"""

import hashlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastipod_local.errors import LocalClusterError
from elastipod_local.golang import go_environment, go_program
from elastipod_local.host import Progress, quiet, run, tail_of, tool_environment
from elastipod_local.paths import PACKAGE, cache_dir
from elastipod_local.processes import dies_with_us
from elastipod_local.state import BUILD_WAIT_S, exclusive

KUBERNETES_VERSION = "v1.34.4"
ETCD_VERSION = "3.6.4"
HELM_VERSION = "v4.3.1"
KWOK_VERSION = "v0.8.0"
KUEUE_VERSION = "v0.15.0"
VERSITYGW_VERSION = "v1.8.0"

BUILD_DEADLINE_S = 3600
REPORT_EVERY_S = 5.0

_COMPONENT_VERSION = "k8s.io/component-base/version"
_KUBERNETES_FLAGS = (
    f"-s -w -X {_COMPONENT_VERSION}.gitVersion={KUBERNETES_VERSION}"
    f" -X {_COMPONENT_VERSION}.gitMajor=1 -X {_COMPONENT_VERSION}.gitMinor={KUBERNETES_VERSION.split('.')[1]}"
)
_PLAIN_FLAGS = "-s -w"
_KWOK_FLAGS = f"-s -w -X sigs.k8s.io/kwok/pkg/consts.Version={KWOK_VERSION}"
_KUEUE_FLAGS = f"-s -w -X sigs.k8s.io/kueue/pkg/version.GitVersion={KUEUE_VERSION}"


@dataclass(frozen=True, slots=True)
class Program:
    """One program: the module of this package that builds it, its Go package, and how to recognize one found on PATH.

    `version_arguments` make the program print a text that holds `version`; a program without any is always built.
    """

    module: str
    package: str
    flags: str
    version_arguments: tuple[str, ...]
    version: str


def _kubernetes(name: str, *version_arguments: str) -> Program:
    arguments = version_arguments or ("--version",)
    return Program("kubernetes", f"k8s.io/kubernetes/cmd/{name}", _KUBERNETES_FLAGS, arguments, KUBERNETES_VERSION)


PROGRAMS: Mapping[str, Program] = {
    "etcd": Program("kubernetes", "go.etcd.io/etcd/server/v3", _PLAIN_FLAGS, ("--version",), ETCD_VERSION),
    "kube-apiserver": _kubernetes("kube-apiserver"),
    "kube-controller-manager": _kubernetes("kube-controller-manager"),
    "kube-scheduler": _kubernetes("kube-scheduler"),
    "kubectl": _kubernetes("kubectl", "version", "--client"),
    "kubelet": _kubernetes("kubelet"),
    "kube-proxy": _kubernetes("kube-proxy"),
    "helm": Program("helm", "helm.sh/helm/v4/cmd/helm", _PLAIN_FLAGS, ("version",), HELM_VERSION),
    # Plays nodes by the hundred, for benchmarks.
    "kwok": Program("kwok", "sigs.k8s.io/kwok/cmd/kwok", _KWOK_FLAGS, ("--version",), KWOK_VERSION),
    "kueue": Program("kueue", "sigs.k8s.io/kueue/cmd/kueue", _KUEUE_FLAGS, (), KUEUE_VERSION),
    # An S3 server over a folder (Apache-2.0), for tests of checkpoints in object stores.
    "versitygw": Program("s3", "github.com/versity/versitygw/cmd/versitygw", _PLAIN_FLAGS, (), VERSITYGW_VERSION),
}
# What is kept beside a module's programs out of the source that they are built from: Go module, folder in it, our name.
BESIDE: Mapping[str, tuple[str, str, str]] = {"kueue": ("sigs.k8s.io/kueue", "charts/kueue", "chart")}
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NODE = ("kubelet", "kube-proxy")
KUEUE = ("kueue", "helm")


def ensure(names: Iterable[str], progress: Progress = quiet) -> dict[str, Path]:
    """Give the path of each named program, building what is missing (minutes, the first time).

    Raises LocalClusterError with the end of the build's log when a build fails.
    """
    wanted = list(names)
    found = {name: path for name in wanted if (path := _built(name) or _installed(name))}
    by_module: dict[str, list[str]] = {}
    for name in wanted:
        if name not in found:
            by_module.setdefault(PROGRAMS[name].module, []).append(name)
    for module in by_module:
        # All programs of a module share most of their packages: building all at once costs little more than one.
        build_module(module, progress)
    return {name: found.get(name) or module_cache(PROGRAMS[name].module) / name for name in wanted}


def module_cache(module: str) -> Path:
    """Give the folder of a module's programs; its name follows from everything that decides what is built."""
    digest = hashlib.sha256()
    for file in (PACKAGE / "go" / module / "go.mod", PACKAGE / "go" / module / "go.sum"):
        digest.update(file.read_bytes())
    for name, program in sorted(PROGRAMS.items()):
        if program.module == module:
            digest.update(f"{name} {program.package} {program.flags}\n".encode())
    if module in BESIDE:
        digest.update(" ".join(BESIDE[module]).encode())
    return cache_dir() / "bin" / digest.hexdigest()[:16]


def _built(name: str) -> Path | None:
    path = module_cache(PROGRAMS[name].module) / name
    return path if path.is_file() else None


def _installed(name: str) -> Path | None:
    """Find the program in KUBEBUILDER_ASSETS or on PATH, if it is of exactly our version."""
    program = PROGRAMS[name]
    if not program.version_arguments:
        return None
    folders = os.pathsep.join(filter(None, [os.environ.get("KUBEBUILDER_ASSETS"), tool_environment()["PATH"]]))
    candidate = shutil.which(name, path=folders)
    if candidate is None:
        return None
    try:
        said = subprocess.run([candidate, *program.version_arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # A whole word, so that v1.34.4 does not accept v1.34.40.
    exact = re.search(rf"(?<![\w.]){re.escape(program.version)}(?![\w.])", said.stdout)
    return Path(candidate) if exact else None


def build_module(module: str, progress: Progress = quiet) -> Path:
    """Build all programs of one module into the cache and give the folder. Shows a line every few seconds."""
    target = module_cache(module)
    target.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(target.parent / f"{module}.lock", wait_s=BUILD_WAIT_S):
        if target.is_dir():
            return target
        draft = target.with_name(target.name + ".new")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        log = target.parent / f"{module}.log"
        log.write_text("")
        programs = {name: program for name, program in PROGRAMS.items() if program.module == module}
        progress(f"building {', '.join(programs)} from source (once; log: {log})")
        go = go_program(progress)
        for flags in sorted({program.flags for program in programs.values()}):
            chosen = {name: program for name, program in programs.items() if program.flags == flags}
            _go_build(go, PACKAGE / "go" / module, draft, flags, chosen, log, progress)
        if module in BESIDE:
            _copy_source(go, PACKAGE / "go" / module, draft, *BESIDE[module])
        draft.rename(target)
    return target


def beside(module: str) -> Path:
    """Give the folder of a built module's source that BESIDE keeps."""
    return module_cache(module) / BESIDE[module][2]


def _copy_source(go: Path, source: Path, target: Path, go_module: str, folder: str, name: str) -> None:
    """Copy a folder of a Go module's source, which the build has fetched, into `target`."""
    listed = run([go, "list", "-m", "-f", "{{.Dir}}", go_module], cwd=source, env=go_environment())
    run(["cp", "--recursive", "--no-preserve=mode", Path(listed.stdout.strip()) / folder, target / name])


def _go_build(
    go: Path, source: Path, target: Path, flags: str, programs: Mapping[str, Program], log: Path, progress: Progress
) -> None:
    """Build programs that share their flags in one call, so that Go spreads the work itself."""
    single = next(iter(programs)) if len(programs) == 1 else ""
    command: list[str | Path] = [go, "build", "-v", "-ldflags", flags, "-o", f"{target}/{single}"]
    with log.open("ab") as output:
        build = subprocess.Popen(
            dies_with_us([*command, *[program.package for program in programs.values()]]),
            cwd=source,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            env=go_environment(),
            text=True,
        )
    with build:
        assert build.stderr is not None
        watch = _BuildWatch(log, progress)
        reader = threading.Thread(target=watch.read, args=(build.stderr,), daemon=True)
        reader.start()
        try:
            watch.report_until_ended(build)
        except BaseException:
            build.kill()
            raise
        finally:
            build.wait()
            reader.join()
    if build.returncode != 0:
        raise LocalClusterError(
            f"building {', '.join(programs)} failed (the Go module proxy must be reachable): {tail_of(log)}"
        )


class _BuildWatch:
    """Counts the packages that `go build -v` names and tells the number now and then."""

    def __init__(self, log: Path, progress: Progress) -> None:
        self._log = log
        self._progress = progress
        self._packages = 0

    def read(self, lines: Iterable[str]) -> None:
        with self._log.open("a") as log:
            for line in lines:
                self._packages += 1
                log.write(line)

    def report_until_ended(self, build: "subprocess.Popen[str]") -> None:
        """Raise LocalClusterError when the build takes longer than BUILD_DEADLINE_S."""
        began = time.monotonic()
        while True:
            try:
                build.wait(REPORT_EVERY_S)
                return
            except subprocess.TimeoutExpired:
                elapsed = time.monotonic() - began
            self._progress(f"  {self._packages} packages compiled or fetched, {elapsed:.0f} s")
            if elapsed > BUILD_DEADLINE_S:
                raise LocalClusterError(f"the build did not end within {BUILD_DEADLINE_S} s; log: {self._log}")
