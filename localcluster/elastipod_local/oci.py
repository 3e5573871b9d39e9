"""Packs folders as layers of OCI images, and images as tar files that `ctr images import` reads. No compression."""

import hashlib
import io
import json
import os
import platform
import stat
import tarfile
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

CHUNK = 1 << 20
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
OVERLAY_OPAQUE = "trusted.overlay.opaque"
# Places that runtimes mount over; what a build step left there is no part of the image.
LEFT_OUT = frozenset({"dev", "proc", "run", "sys", "tmp"})


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What a container of the image is started with."""

    env: Mapping[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    workdir: str = "/"
    user: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[str, ...] = ()

    def encode(self) -> dict[str, object]:
        entries: dict[str, object] = {
            "Env": [f"{name}={value}" for name, value in self.env.items()],
            "Entrypoint": list(self.entrypoint),
            "Cmd": list(self.cmd),
            "WorkingDir": self.workdir,
            "User": self.user,
            "Labels": dict(self.labels),
            "ExposedPorts": {port if "/" in port else f"{port}/tcp": {} for port in self.ports},
        }
        return {key: value for key, value in entries.items() if value}


@dataclass(frozen=True, slots=True)
class Blob:
    """A file that is named by the hash of its content."""

    path: Path
    digest: str
    size: int

    @classmethod
    def of(cls, path: Path) -> "Blob":
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
        return cls(path, f"sha256:{digest.hexdigest()}", path.stat().st_size)


def pack_layer(folder: Path, target: Path) -> None:
    """Write one layer's tar from the upper folder of an overlay; deletions become OCI whiteouts."""
    draft = target.with_name(target.name + ".new")
    with tarfile.open(draft, "w", format=tarfile.PAX_FORMAT) as tar:
        for path in _walk(folder):
            name = path.relative_to(folder).as_posix()
            for entry in _entries(tar, path, name):
                if entry.isreg() and entry.size:
                    with path.open("rb") as content:
                        tar.addfile(entry, content)
                else:
                    tar.addfile(entry)
    draft.replace(target)


def _walk(folder: Path) -> Iterator[Path]:
    """Give everything below, parents first, in a fixed order; of LEFT_OUT only the folders themselves."""
    for entry in sorted(folder.iterdir()):
        yield entry
        if entry.is_dir() and not entry.is_symlink() and not (entry.name in LEFT_OUT and entry.parent == folder):
            yield from _walk_below(entry)


def _walk_below(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        yield entry
        if entry.is_dir() and not entry.is_symlink():
            yield from _walk_below(entry)


def _entries(tar: tarfile.TarFile, path: Path, name: str) -> list[tarfile.TarInfo]:
    info = path.lstat()
    if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:  # how an overlay says that a file was deleted
        head, _, tail = name.rpartition("/")
        return [tarfile.TarInfo(f"{head}/.wh.{tail}" if head else f".wh.{tail}")]
    if stat.S_ISSOCK(info.st_mode):
        return []
    entry = tar.gettarinfo(path, arcname=name)
    entry.uname = entry.gname = ""
    entry.mtime = int(entry.mtime)
    entries = [entry]
    if entry.isdir() and _is_opaque(path):
        entries.append(tarfile.TarInfo(f"{name}/.wh..wh..opq"))
    return entries


def _is_opaque(folder: Path) -> bool:
    try:
        return os.getxattr(folder, OVERLAY_OPAQUE) == b"y"
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Image:
    """An image under its full name: layers from the bottom up, and how its containers start."""

    name: str
    layers: tuple[Blob, ...]
    config: ImageConfig

    @property
    def digest(self) -> str:
        """The manifest's digest, which names the whole image."""
        return _sha256(self._manifest())

    def write(self, target: Path, present: Container[str] = ()) -> None:
        """Write the image as one tar file. Layers whose digests are in `present` are left out: the reader has them."""
        config, manifest = self._config(), self._manifest()
        media = "application/vnd.oci.image.manifest.v1+json"
        annotations = {"io.containerd.image.name": self.name}
        index = [{"mediaType": media, **_descriptor(manifest), "annotations": annotations}]
        with tarfile.open(target, "w") as tar:
            _add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
            _add(tar, "index.json", _json({"schemaVersion": 2, "manifests": index}))
            for content in (config, manifest):
                _add(tar, _blob_name(_sha256(content)), content)
            for layer in {layer.digest: layer for layer in self.layers if layer.digest not in present}.values():
                entry = tarfile.TarInfo(_blob_name(layer.digest))
                entry.size = layer.size
                with layer.path.open("rb") as stream:
                    tar.addfile(entry, stream)

    def _config(self) -> bytes:
        return _json(
            {
                "architecture": ARCHITECTURES[platform.machine()],
                "os": "linux",
                "config": self.config.encode(),
                "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in self.layers]},
            }
        )

    def _manifest(self) -> bytes:
        media = "application/vnd.oci.image"
        layers = [
            {"mediaType": f"{media}.layer.v1.tar", "digest": layer.digest, "size": layer.size} for layer in self.layers
        ]
        return _json(
            {
                "schemaVersion": 2,
                "mediaType": f"{media}.manifest.v1+json",
                "config": {"mediaType": f"{media}.config.v1+json", **_descriptor(self._config())},
                "layers": layers,
            }
        )


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _descriptor(content: bytes) -> dict[str, object]:
    return {"digest": _sha256(content), "size": len(content)}


def _blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))
