"""What is said before the machine is prepared, and that programs and images come side by side."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.patience import PATIENCE_S
from tests.preparation import PROGRAMS, needs_images, programs_for

from elastipod_local import binaries, prepare
from elastipod_local.errors import LocalClusterError, UnsupportedError
from elastipod_local.host import Progress
from elastipod_local.images import ImageSet

IMAGES = ImageSet("key", (), Path("/seed"), Path("/site-packages"))
CACHE = Path("/root/.cache/elastipod")


def test_nothing_is_said_where_all_is_there() -> None:
    assert prepare.announcement(programs=[], packages=[], images=False, cache=CACHE) == ""


def test_one_line_names_time_disk_and_packages() -> None:
    line = prepare.announcement(programs=["etcd", "kubelet"], packages=["containerd", "runc"], images=True, cache=CACHE)
    assert line == (
        "first run: gets 2 programs and the nodes' images: about 8 min on two cores (3 where official releases can be "
        "downloaded), 15 GB of disk in /root/.cache/elastipod and the caches of Go and uv; installs on this machine the Debian "
        "packages containerd, runc"
    )


@pytest.mark.parametrize(
    ("programs", "images", "packages", "said"),
    [
        (["etcd"], False, [], "gets 1 program: about 8 min on two cores (1 where"),
        ([], True, [], "gets the nodes' images: about 3 min on two cores, 8 GB"),
        ([], False, ["runc"], "first run: installs on this machine the Debian packages runc"),
    ],
)
def test_only_what_is_missing_is_named(programs: list[str], images: bool, packages: list[str], said: str) -> None:
    assert said in prepare.announcement(programs=programs, packages=packages, images=images, cache=CACHE)


def test_too_little_room_is_said_with_what_to_do() -> None:
    line = prepare.announcement(programs=["etcd"], packages=[], images=True, cache=CACHE, free_gb=11.4)
    assert "15 GB of disk in /root/.cache/elastipod and the caches of Go and uv (11 GB are free there; " in line
    assert line.endswith("XDG_CACHE_HOME names another folder)")
    assert "free there" not in prepare.announcement(
        programs=["etcd"], packages=[], images=False, cache=CACHE, free_gb=11.4
    )


@pytest.mark.parametrize(("missing", "is_refused"), [(["etcd"], True), ([], False)])
def test_a_full_disk_is_refused_before_anything_is_compiled(
    missing: list[str], is_refused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where all is there, a full disk is no reason."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(binaries, "missing", lambda names: missing)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=200_000_000))
    said: list[str] = []
    if is_refused:
        with pytest.raises(
            LocalClusterError, match=r"0\.2 GB are free .* set XDG_CACHE_HOME to a folder on another disk"
        ):
            prepare.announce(["etcd"], with_images=False, progress=said.append)
    else:
        prepare.announce(["etcd"], with_images=False, progress=said.append)
    assert said == []


class Machine:
    """A machine in which the images wait until the programs are under way, and the other way round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.programs_began, self.images_began = threading.Event(), threading.Event()
        self.programs_error: LocalClusterError | None = None
        self.images_error: LocalClusterError | None = None
        self.nodes_error: LocalClusterError | None = None
        monkeypatch.setattr(prepare, "require_nodes_possible", self.is_asked)
        monkeypatch.setattr(prepare, "announce", lambda names, **_: None)
        monkeypatch.setattr(prepare, "ensure_packages", lambda progress: None)
        monkeypatch.setattr(prepare, "ensure_images", self.images)
        monkeypatch.setattr(binaries, "ensure", self.programs)

    def is_asked(self) -> None:
        if self.nodes_error:
            raise self.nodes_error

    def programs(self, names: Iterable[str], progress: Progress) -> dict[str, Path]:
        self.programs_began.set()
        assert self.images_began.wait(PATIENCE_S)
        if self.programs_error:
            raise self.programs_error
        progress("  45 % compiled")
        progress("fetching helm")
        return {}

    def images(self, progress: Progress) -> ImageSet:
        assert self.programs_began.wait(PATIENCE_S)
        progress("  bootstrapping Debian bookworm (once; log: /a/log)")
        self.images_began.set()
        if self.images_error:
            raise self.images_error
        return IMAGES


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_programs_and_images_come_side_by_side_and_both_are_told_of(machine: Machine) -> None:
    said: list[str] = []
    assert prepare.prepare(["etcd"], with_images=True, progress=said.append) == IMAGES
    assert said[0] == "  bootstrapping Debian bookworm (once; log: /a/log)"
    assert said[1] in ("  45 % compiled; beside it: bootstrapping Debian bookworm", "  45 % compiled")
    assert said[2] == "fetching helm"


def test_images_that_cannot_be_made_are_told_after_the_programs(machine: Machine) -> None:
    machine.images_error = LocalClusterError("debootstrap failed")
    said: list[str] = []
    with pytest.raises(LocalClusterError, match="debootstrap failed"):
        prepare.prepare(["etcd"], with_images=True, progress=said.append)
    assert "fetching helm" in said


def test_programs_that_cannot_be_had_are_told_at_once(machine: Machine) -> None:
    machine.programs_error = LocalClusterError("the build failed")
    with pytest.raises(LocalClusterError, match="the build failed"):
        prepare.prepare(["etcd"], with_images=True)


def test_a_machine_that_cannot_have_nodes_is_told_before_anything_is_compiled(machine: Machine) -> None:
    machine.nodes_error = UnsupportedError("even root gets no namespaces")
    with pytest.raises(UnsupportedError, match="no namespaces"):
        prepare.prepare(["etcd"], with_images=True)
    assert not machine.programs_began.is_set()
    assert not machine.images_began.is_set()


def test_without_nodes_no_image_is_made(machine: Machine) -> None:
    machine.images_began.set()
    machine.nodes_error = UnsupportedError("even root gets no namespaces")
    assert prepare.prepare(["etcd"], with_images=False) is None


def test_what_the_tiers_need_is_known() -> None:
    for tier, fixtures in PROGRAMS.items():
        names = programs_for(tier, fixtures)
        assert set(names) <= set(binaries.MODULES), tier
        assert needs_images(names) == (tier == "e2e")
    assert programs_for("e2e", ["server"]) == ["versitygw"]
    assert "kueue" in programs_for("e2e", ["cluster"])  # a test installs it
    assert programs_for("chart", []) == ["helm"]
    assert programs_for("unit", ["cluster"]) == []


def test_images_that_take_longer_than_the_programs_are_waited_for_aloud(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "REPORT_EVERY_S", 0.05)
    said: list[str] = []
    told = threading.Event()

    def tell(text: str) -> None:
        said.append(text)
        if text.startswith("  waiting for the images"):
            told.set()

    def slow(progress: Progress) -> ImageSet:
        images = machine.images(progress)
        assert told.wait(PATIENCE_S)
        return images

    monkeypatch.setattr(prepare, "ensure_images", slow)
    assert prepare.prepare(["etcd"], with_images=True, progress=tell) == IMAGES
    assert said[-1].startswith("  waiting for the images (bootstrapping Debian bookworm), ")
