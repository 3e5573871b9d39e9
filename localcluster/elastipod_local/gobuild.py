"""Programs built from Go source: the modules of this package pin what is compiled, and a cache keeps the result."""

import hashlib
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastipod_local.errors import LocalClusterError
from elastipod_local.golang import go_environment, go_program
from elastipod_local.host import Progress, ends_with_parent, quiet, run, tail_of
from elastipod_local.paths import PACKAGE, cache_dir
from elastipod_local.state import BUILD_WAIT_S, exclusive

BUILD_DEADLINE_S = 3600
LIST_DEADLINE_S = 900  # fetches the source of all modules as well
REPORT_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class SourceFolder:
    """A folder of a Go module's source that is kept beside a program: the program, the module, the folder, our name."""

    program: str
    go_module: str
    folder: str
    name: str


@dataclass(frozen=True, slots=True)
class GoModule:
    """A folder `go/<name>` of this package and what is built from it.

    flags: for the linker, one set for all programs. They do not affect compilation, and `-X` of a variable that a
    program lacks is ignored, so one `go build` compiles and links everything.
    packages: name of each program -> its Go package.
    """

    name: str
    flags: str
    packages: Mapping[str, str]
    beside: SourceFolder | None = None

    @property
    def folder(self) -> Path:
        return PACKAGE / "go" / self.name

    @property
    def cache(self) -> Path:
        """The folder of the built programs. Its name follows from everything that decides what is built."""
        digest = hashlib.sha256()
        for file in ("go.mod", "go.sum"):
            digest.update((self.folder / file).read_bytes())
        digest.update(f"{self.flags}\n{sorted(self.packages.items())}\n{self.beside}".encode())
        return cache_dir() / "bin" / f"{self.name}-{digest.hexdigest()[:16]}"


def built(module: GoModule, name: str) -> Path | None:
    """Give the path of a program that was built before, None when it was not."""
    path = module.cache / name
    return path if path.is_file() else None


def build(module: GoModule, names: Iterable[str], progress: Progress = quiet) -> Path:
    """Build the named programs into the module's cache, where they are missing, and give that folder.

    Raises LocalClusterError with the end of the log when the build fails.
    """
    target = module.cache
    target.mkdir(parents=True, exist_ok=True)
    with exclusive(target.parent / f"{module.name}.lock", wait_s=BUILD_WAIT_S, progress=progress):
        missing = {name: module.packages[name] for name in names if built(module, name) is None}
        if missing:
            draft = target.with_name(target.name + ".new")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            _build_into(draft, module, missing, progress)
            # Folders first: a program that is there vouches for what lies beside it.
            for path in sorted(draft.iterdir(), key=Path.is_file):
                shutil.rmtree(target / path.name, ignore_errors=True)
                path.rename(target / path.name)
            draft.rmdir()
    return target


def _build_into(draft: Path, module: GoModule, packages: Mapping[str, str], progress: Progress) -> None:
    log = draft.parent / f"{module.name}.log"
    log.write_text("")
    progress(f"building {', '.join(packages)} from source (once; log: {log})")
    go = go_program(progress)
    progress("  fetching what sources are missing")
    total = _packages_to_compile(go, module, packages.values(), log)
    _go_build(go, module, draft, packages, BuildWatch(log, total, progress), log)
    for name, package in packages.items():
        (draft / binary_name(package)).rename(draft / name)
    if module.beside is not None and module.beside.program in packages:
        _copy_source(go, module, module.beside, draft)


def binary_name(package: str) -> str:
    """Give the name that Go gives the program of a package: its last element that is no major version."""
    *rest, last = package.split("/")
    return rest[-1] if re.fullmatch(r"v[0-9]+", last) else last


def _packages_to_compile(go: Path, module: GoModule, packages: Iterable[str], log: Path) -> int:
    """Count what Go's own cache lacks, but for programs, which are always linked; fetches the source on the way."""
    stale = ["list", "-deps", "-f", '{{if and .Stale (ne .Name "main")}}{{.ImportPath}}{{end}}']
    try:
        listed = run([go, *stale, *packages], cwd=module.folder, env=go_environment(), timeout_s=LIST_DEADLINE_S)
    except LocalClusterError as failed:
        raise LocalClusterError(f"{failed}; the Go module proxy must be reachable") from failed
    with log.open("a") as output:
        output.write(listed.stderr)
    return len(listed.stdout.split())


def _copy_source(go: Path, module: GoModule, wanted: SourceFolder, target: Path) -> None:
    """Copy a folder of a Go module's source, which the build has fetched, into `target`."""
    listed = run([go, "list", "-m", "-f", "{{.Dir}}", wanted.go_module], cwd=module.folder, env=go_environment())
    source = Path(listed.stdout.strip()) / wanted.folder
    run(["cp", "--recursive", "--no-preserve=mode", source, target / wanted.name])


def _go_build(
    go: Path, module: GoModule, target: Path, packages: Mapping[str, str], watch: "BuildWatch", log: Path
) -> None:
    """Build programs in one call, so that Go spreads the work itself."""
    with log.open("ab") as output:
        build = subprocess.Popen(
            ends_with_parent([go, "build", "-v", "-ldflags", module.flags, "-o", f"{target}/", *packages.values()]),
            cwd=module.folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            env=go_environment(),
            text=True,
        )
    with build:
        assert build.stderr is not None
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
            f"building {', '.join(packages)} failed (the Go module proxy must be reachable): {tail_of(log)}"
        )


class BuildWatch:
    """Counts the packages that `go build -v` names and tells the share now and then."""

    def __init__(self, log: Path, total: int, progress: Progress, *, report_every_s: float = REPORT_EVERY_S) -> None:
        self._log = log
        self._report_every_s = report_every_s
        self._total = total
        self._progress = progress
        self._packages = 0

    def read(self, lines: Iterable[str]) -> None:
        with self._log.open("a") as log:
            for line in lines:
                self._packages += not line.startswith("go: ")  # `go: downloading ...` names no package
                log.write(line)

    def report_until_ended(self, build: "subprocess.Popen[Any]") -> None:
        """Raise LocalClusterError when the build takes longer than BUILD_DEADLINE_S."""
        began = time.monotonic()
        while True:
            try:
                build.wait(self._report_every_s)
                return
            except subprocess.TimeoutExpired:
                elapsed = time.monotonic() - began
            self._progress(f"  {compiled_share(self._packages, self._total)}, {elapsed:.0f} s")
            if elapsed > BUILD_DEADLINE_S:
                raise LocalClusterError(f"the build did not end within {BUILD_DEADLINE_S} s; log: {self._log}")


def compiled_share(compiled: int, total: int) -> str:
    """Say how much of a build is done; linking follows the last package."""
    if compiled >= total:
        return "all packages compiled, linking"
    return f"{compiled * 100 // total} % compiled ({compiled} of {total} packages)"
