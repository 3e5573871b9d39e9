"""Files out of an image or a chart in an OCI registry, by its digest."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastipod_local.errors import LocalClusterError
from elastipod_local.httpfetch import Transfer, base_of, download, unpack

MANIFESTS = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        *("oci.image.index.v1", "oci.image.manifest.v1"),
        *("docker.distribution.manifest.list.v2", "docker.distribution.manifest.v2"),
    )
)


@dataclass(frozen=True, slots=True)
class OciFiles:
    """Files of what a registry has under a digest, which vouches for all of it.

    members: our name -> path in a layer; the uppermost layer that has it counts. A path that ends with a slash stands
    for the files below it.
    """

    registry: str
    repository: str
    digest: str
    members: Mapping[str, str]

    @property
    def targets(self) -> Iterable[str]:
        return self.members

    def serves(self, arch: str) -> bool:
        return True

    def identity(self, arch: str) -> str:
        return f"{self.digest} {arch}"

    def fetch(self, arch: str, into: Path, transfer: Transfer) -> None:
        manifest = self._manifest(self.digest, into, transfer)
        if "manifests" in manifest:
            manifest = self._manifest(_of_platform(manifest, arch), into, transfer)
        wanted = {member: target for target, member in self.members.items()}
        for layer in reversed(manifest["layers"]):
            if wanted:
                found = self._unpack_layer(layer["digest"], wanted, into, transfer)
                wanted = {member: target for member, target in wanted.items() if target not in found}
        if wanted:
            raise LocalClusterError(f"{self.registry}/{self.repository} has no {' and no '.join(sorted(wanted))}")

    def _unpack_layer(self, digest: str, wanted: Mapping[str, str], into: Path, transfer: Transfer) -> set[str]:
        file = into / "layer"
        download(self._url("blobs", digest), file, digest, transfer)
        found = unpack(file, wanted, into)
        file.unlink()
        return found

    def _manifest(self, digest: str, into: Path, transfer: Transfer) -> dict[str, Any]:
        file = into / "manifest"
        download(self._url("manifests", digest), file, digest, transfer, headers={"Accept": MANIFESTS})
        manifest: dict[str, Any] = json.loads(file.read_bytes())
        file.unlink()
        return manifest

    def _url(self, kind: str, digest: str) -> str:
        return base_of(f"{self.registry}/v2/{self.repository}/{kind}/{digest}")


def _of_platform(index: Mapping[str, Any], arch: str) -> str:
    for entry in index["manifests"]:
        if (entry.get("platform", {}).get("os"), entry["platform"].get("architecture")) == ("linux", arch):
            digest: str = entry["digest"]
            return digest
    raise LocalClusterError(f"the image is not made for linux/{arch}")
