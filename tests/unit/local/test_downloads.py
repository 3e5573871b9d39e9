"""Official releases from a server with their layout: what is taken, what is refused, and how long it takes to find out."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.nonempty import every
from tests.unit.local.release_hosts import ReleaseHosts, archive, release_hosts, wait_for_threads

from elastipod_local import binaries, downloads, gobuild, httpfetch, kubewheel, state
from elastipod_local.downloads import Archive, Release
from elastipod_local.errors import LocalClusterError
from elastipod_local.gobuild import GoModule
from elastipod_local.host import Progress
from elastipod_local.httpfetch import Transfer, base_of, download
from elastipod_local.ociregistry import OciFiles
from elastipod_local.state import exclusive

ARCH = "amd64"


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReleaseHosts]:
    """The hosts, reached by the mirror's variable; an empty cache, and no proxies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    before = set(threading.enumerate())
    with release_hosts() as served:
        monkeypatch.setenv(httpfetch.VARIABLE, served.url)
        yield served
    wait_for_threads(before)


def program(name: str) -> bytes:
    return f"#!/bin/sh\necho {name}\n".encode()


def played(release: Release, hosts: ReleaseHosts) -> Release:
    """Serve a release at its own addresses with small programs; give it with their checksums."""
    parts: list[Archive | OciFiles] = []
    for part in release.parts:
        if isinstance(part, Archive):
            url = part.url.format(arch=ARCH)
            files = {member.format(arch=ARCH): program(name) for name, member in part.members.items()}
            content = archive({"README": b"x", **files})
            hosts.add(url, content)
            parts.append(replace(part, checksums={ARCH: "sha512:" + hashlib.sha512(content).hexdigest()}))
        else:
            assert isinstance(part, OciFiles)
            files = {member: program(name) for name, member in part.members.items() if not member.endswith("/")}
            files |= {f"{member}values.yaml": b"a: 1\n" for member in part.members.values() if member.endswith("/")}
            layers = [{"etc/passwd": b""}, files]
            parts.append(replace(part, digest=hosts.add_image(part.registry, part.repository, ARCH, layers)))
    return replace(release, parts=tuple(parts))


@pytest.fixture
def all_releases(hosts: ReleaseHosts, monkeypatch: pytest.MonkeyPatch) -> ReleaseHosts:
    monkeypatch.setattr(downloads, "RELEASES", tuple(played(release, hosts) for release in downloads.RELEASES))
    return hosts


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is built in place of a build."""
    names_built: list[str] = []

    def build(module: GoModule, names: list[str], progress: Progress) -> Path:
        names_built.extend(names)
        return module.cache

    monkeypatch.setattr(gobuild, "build", build)
    monkeypatch.setattr(kubewheel, "offers", lambda name: False)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", "")
    monkeypatch.setenv("PATH", "/nowhere")
    return names_built


def test_everything_of_a_cluster_is_downloaded_and_nothing_built(all_releases: ReleaseHosts, built: list[str]) -> None:
    wanted = [*binaries.CONTROL_PLANE, *binaries.NODE, *binaries.KUEUE]
    paths = binaries.ensure(wanted)
    assert built == []
    assert {name: paths[name].read_bytes() for name in wanted} == {name: program(name) for name in wanted}
    assert every(path.stat().st_mode & 0o111 == 0o111 for path in paths.values())
    assert (binaries.kueue_chart() / "values.yaml").read_text() == "a: 1\n"
    hosts_asked = {path.split("/")[1] for path in all_releases.asked}
    assert hosts_asked == {"dl.k8s.io", "github.com", "registry.k8s.io", "get.helm.sh"}


def test_what_was_downloaded_is_not_asked_for_again(all_releases: ReleaseHosts, built: list[str]) -> None:
    first = binaries.ensure(["etcd", "kubelet"])
    all_releases.asked.clear()
    assert binaries.ensure(["etcd", "kubelet", "kube-proxy"]) == {
        **first,
        "kube-proxy": first["kubelet"].parent / "kube-proxy",
    }
    assert all_releases.asked == []


def test_a_host_that_lacks_a_release_costs_a_build_of_that_one(all_releases: ReleaseHosts, built: list[str]) -> None:
    all_releases.files = {path: body for path, body in all_releases.files.items() if "github.com" not in path}
    said: list[str] = []
    paths = binaries.ensure(["kubelet", "etcd"], said.append)
    assert built == ["etcd"]
    assert paths["kubelet"].read_bytes() == program("kubelet")
    assert any(text.startswith("not downloaded: etcd (") and "404" in text for text in said)


def test_another_content_is_refused_and_leaves_nothing(all_releases: ReleaseHosts, built: list[str]) -> None:
    (path,) = (path for path in all_releases.files if "github.com" in path)
    all_releases.files[path] = archive({"etcd-v3.6.4-linux-amd64/etcd": b"something else"})
    said: list[str] = []
    binaries.ensure(["etcd"], said.append)
    assert built == ["etcd"]
    assert any("has the sha512" in text for text in said)
    assert downloads.fetched("etcd") is None


class OntoAFullDisk(Archive):
    """An archive whose download finds no room."""

    def fetch(self, arch: str, into: Path, transfer: Transfer) -> None:
        download(base_of(self.url).format(arch=arch), Path("/dev/full"), self.checksums[arch], transfer)


def test_a_full_disk_is_told_as_such_and_nothing_is_built(
    hosts: ReleaseHosts, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (release,) = (played(release, hosts) for release in downloads.RELEASES if release.name == "etcd")
    (part,) = release.parts
    assert isinstance(part, Archive)
    full = OntoAFullDisk(part.url, part.checksums, part.members)
    monkeypatch.setattr(downloads, "RELEASES", (replace(release, parts=(full,)),))
    with pytest.raises(OSError, match="No space left on device") as raised:
        binaries.ensure(["etcd"])
    assert raised.value.errno == errno.ENOSPC
    assert built == []


def test_an_archive_that_cannot_be_unpacked_for_want_of_room_is_no_broken_archive(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(archive({"etcd": b"x" * 100_000}))
    (tmp_path / "etcd").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        httpfetch.unpack(tmp_path / "a.tar.gz", {"etcd": "etcd"}, tmp_path)


def test_a_manifest_of_another_digest_is_refused(all_releases: ReleaseHosts, built: list[str]) -> None:
    for path in all_releases.files:
        if "/manifests/" in path:
            all_releases.files[path] += b" "
    binaries.ensure(["kueue"])
    assert built == ["kueue"]


def test_switched_off_nothing_is_asked(
    all_releases: ReleaseHosts, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(httpfetch.VARIABLE, "off")
    binaries.ensure(["etcd"])
    assert (built, all_releases.asked) == (["etcd"], [])


def test_a_machine_of_another_kind_builds(
    all_releases: ReleaseHosts, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    binaries.ensure(["etcd"])
    assert (built, all_releases.asked) == (["etcd"], [])


def test_a_host_that_hangs_is_given_up(
    all_releases: ReleaseHosts, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(httpfetch, "OPEN_DEADLINE_S", 0.2)
    all_releases.hanging = set(all_releases.files)
    said: list[str] = []
    binaries.ensure(["etcd"], said.append)
    assert built == ["etcd"]
    assert any("no answer within 0.2 s" in text for text in said)


def test_hosts_are_asked_side_by_side(
    all_releases: ReleaseHosts, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(httpfetch, "OPEN_DEADLINE_S", 60.0)
    all_releases.meeting = threading.Barrier(3)  # nobody is answered before all three were asked
    binaries.ensure(["kubelet", "etcd", "kueue"])
    assert built == []


def test_the_deadline_is_the_promised_one() -> None:
    assert httpfetch.OPEN_DEADLINE_S == 5.0


def test_redirections_are_followed(all_releases: ReleaseHosts, built: list[str]) -> None:
    (path,) = (path for path in all_releases.files if "github.com" in path)
    all_releases.files["/elsewhere"] = all_releases.files.pop(path)
    all_releases.moved[path] = "/elsewhere"
    assert binaries.ensure(["etcd"])["etcd"].read_bytes() == program("etcd")
    assert built == []


def test_proxies_of_the_environment_are_used(
    all_releases: ReleaseHosts, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", all_releases.url)
    monkeypatch.setenv(httpfetch.VARIABLE, "http://mirror.invalid")
    all_releases.files = {f"http://mirror.invalid{path}": body for path, body in all_releases.files.items()}
    binaries.ensure(["etcd"])
    assert built == []
    assert every(path.startswith("http://mirror.invalid/github.com/") for path in all_releases.asked)


def test_a_mirror_that_is_no_address_is_told(
    all_releases: ReleaseHosts, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(httpfetch.VARIABLE, "mirror")
    said: list[str] = []
    binaries.ensure(["etcd"], said.append)
    assert built == ["etcd"]
    assert any("unknown url type" in text for text in said)


def test_an_image_for_other_machines_is_told(hosts: ReleaseHosts, tmp_path: Path) -> None:
    digest = hosts.add_image("https://registry.k8s.io", "a/b", "s390x", [{"manager": b""}])
    with pytest.raises(LocalClusterError, match="not made for linux/amd64"):
        OciFiles("https://registry.k8s.io", "a/b", digest, {"b": "manager"}).fetch(ARCH, tmp_path, Transfer())


def test_an_image_without_the_program_is_told(hosts: ReleaseHosts, tmp_path: Path) -> None:
    digest = hosts.add_image("https://registry.k8s.io", "a/b", ARCH, [{"other": b""}])
    with pytest.raises(LocalClusterError, match="has no manager"):
        OciFiles("https://registry.k8s.io", "a/b", digest, {"b": "manager"}).fetch(ARCH, tmp_path, Transfer())


def test_the_uppermost_layer_counts(hosts: ReleaseHosts, tmp_path: Path) -> None:
    digest = hosts.add_image("https://registry.k8s.io", "a/b", ARCH, [{"manager": b"old"}, {"./manager": b"new"}])
    OciFiles("https://registry.k8s.io", "a/b", digest, {"b": "manager"}).fetch(ARCH, tmp_path, Transfer())
    assert (tmp_path / "b").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_an_archive_writes_nothing_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(archive({"kueue/../../evil": b"x", "kueue/good": b"y"}))
    into = tmp_path / "deep" / "into"
    into.mkdir(parents=True)
    assert httpfetch.unpack(tmp_path / "a.tar.gz", {"kueue/": "chart"}, into) == {"chart"}
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["a.tar.gz", "good"]


def test_what_is_no_archive_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"<html>sign in</html>")
    with pytest.raises(LocalClusterError, match="no readable archive"):
        httpfetch.unpack(tmp_path / "a.tar.gz", {"a": "a"}, tmp_path)


def test_every_pinned_checksum_has_its_length() -> None:
    lengths = {"sha256": 64, "sha512": 128}
    pinned = [
        checksum
        for release in downloads.RELEASES
        for part in release.parts
        for checksum in (part.checksums.values() if isinstance(part, Archive) else [part.identity("").split()[0]])
    ]
    assert len(pinned) == 8
    for checksum in pinned:
        algorithm, _, digest = checksum.partition(":")
        assert len(bytes.fromhex(digest)) * 2 == lengths[algorithm]


def test_a_download_that_waits_for_another_process_is_told_as_such(
    all_releases: ReleaseHosts, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "REPORT_EVERY_S", 0.1)
    monkeypatch.setattr(state, "TELL_AFTER_S", 0.0)
    [release] = [one for one in downloads.RELEASES if one.name == "etcd"]
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        held.close()

    with ExitStack() as held:
        held.enter_context(exclusive(release.cache("amd64").parent / "etcd-release.lock", wait_s=0))
        assert "etcd" in downloads.fetch(["etcd"], tell)
    assert f"waiting for another elastipod process (pid {os.getpid()})" in told[0]
    assert "connecting" not in told[0]
