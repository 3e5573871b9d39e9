"""Everything that a cluster needs on this machine, before anything of the cluster is started.

Programs are compiled while Debian packages and images are fetched: one waits for the processor, the other for the network.
"""

import math
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastipod_local import binaries
from elastipod_local.errors import LocalClusterError
from elastipod_local.host import Progress, Reminder, quiet
from elastipod_local.images import ImageSet, ensure_images, has_built_images
from elastipod_local.machine import require_nodes_possible
from elastipod_local.packages import ensure_packages, missing_packages
from elastipod_local.paths import cache_dir

# On two cores from nothing; docs/design/local-cluster.md says how to measure them.
PROGRAMS_MIN, DOWNLOADED_PROGRAMS_MIN, IMAGES_MIN = 8, 1, 3
PROGRAMS_GB, IMAGES_GB = 7, 8
REPORT_EVERY_S = 30.0  # once only the images are missing
LEAST_GB = 1  # the programs alone, without anything that a compiler needs


def prepare(names: Sequence[str], *, with_images: bool, progress: Progress = quiet) -> ImageSet | None:
    """Fetch or build the named programs and, with_images, the Debian packages and images of nodes; gives the images.

    The first line says what is going to happen to this machine, where that takes minutes. Raises LocalClusterError:
    at once when a program cannot be had or this machine cannot have nodes, after the programs when an image cannot.
    """
    if with_images:
        require_nodes_possible()
    announce(names, with_images=with_images, progress=progress)
    if not with_images:
        binaries.ensure(names, progress)
        return None
    both = _SideBySide(progress)
    both.start_images()
    binaries.ensure(names, both.tell_of_programs)
    return both.wait_for_images()


def announce(names: Sequence[str], *, with_images: bool, progress: Progress) -> None:
    """Say in one line what is missing and what getting it means; nothing where all is there.

    Raises LocalClusterError where there is no room to begin. Whether all will fit cannot be known: an earlier run may have
    got a part of it, programs that are downloaded take little, and Go's caches may lie elsewhere.
    """
    cache = cache_dir()
    programs, images = binaries.missing(names), with_images and not has_built_images()
    free_gb = shutil.disk_usage(cache).free / 1e9
    if (images or set(programs) & {*binaries.CONTROL_PLANE, *binaries.NODE}) and free_gb < LEAST_GB:
        raise LocalClusterError(
            f"programs and images are kept in {cache}, and only {free_gb:.1f} GB are free there; free some, or set "
            "XDG_CACHE_HOME to a folder on another disk"
        )
    packages = missing_packages() if with_images else []
    line = announcement(programs=programs, packages=packages, images=images, cache=cache, free_gb=free_gb)
    if line:
        progress(line)


def announcement(
    *, programs: Sequence[str], packages: Sequence[str], images: bool, cache: Path, free_gb: float = math.inf
) -> str:
    """Give the line, '' where nothing is missing that takes long. free_gb: of the cache's disk."""
    said = []
    if programs or images:
        some = [f"{len(programs)} program{'s' if len(programs) > 1 else ''}"] if programs else []
        what = " and ".join([*some, *(["the nodes' images"] if images else [])])
        slow = max(PROGRAMS_MIN if programs else 0, IMAGES_MIN if images else 0)
        quick = max(DOWNLOADED_PROGRAMS_MIN if programs else 0, IMAGES_MIN if images else 0)
        shorter = f" ({quick} where official releases can be downloaded)" if quick < slow else ""
        space = (PROGRAMS_GB if programs else 0) + (IMAGES_GB if images else 0)
        room = f" ({free_gb:.0f} GB are free there; XDG_CACHE_HOME names another folder)" if free_gb < space else ""
        said.append(
            f"gets {what}: about {slow} min on two cores{shorter}, {space} GB of disk in {cache} and the caches of Go and uv{room}"
        )
    if packages:
        said.append(f"installs on this machine the Debian packages {', '.join(packages)}")
    return f"first run: {'; '.join(said)}" if said else ""


@dataclass(slots=True)
class _SideBySide:
    """The images in a thread beside the programs, and one progress that tells of both."""

    progress: Progress
    _image_step: str = ""
    _found: list[ImageSet] = field(default_factory=list)
    _errors: list[BaseException] = field(default_factory=list)
    _thread: threading.Thread | None = None

    def start_images(self) -> None:
        # A daemon: when the programs fail or the user interrupts, nobody waits for it, and its children die with it.
        self._thread = threading.Thread(target=self._make_images, name="images", daemon=True)
        self._thread.start()

    def _make_images(self) -> None:
        try:
            ensure_packages(self._tell_of_images)
            self._found.append(ensure_images(self._tell_of_images))
        except BaseException as failed:  # raised by wait_for_images
            self._errors.append(failed)
        finally:
            self._image_step = ""

    def wait_for_images(self) -> ImageSet:
        assert self._thread is not None
        reminder = Reminder(self.progress, every_s=REPORT_EVERY_S)
        while self._thread.is_alive():
            self._thread.join(timeout=REPORT_EVERY_S / 10)
            if step := self._image_step:
                reminder.remind(f"  waiting for the images ({step})")
        if self._errors:
            raise self._errors[0]
        return self._found[0]

    def tell_of_programs(self, text: str) -> None:
        # Lines of a build come every few seconds; without the other half the images would seem to stand still.
        self.progress(f"{text}; meanwhile: {self._image_step}" if self._image_step and text[:1] == " " else text)

    def _tell_of_images(self, text: str) -> None:
        self._image_step = text.strip().partition(" (")[0][:60]
        self.progress(text)
