"""Layers and image files: what is packed, what is left out, and that the same input gives the same image."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from elastipod_local.oci import Blob, Image, ImageConfig, pack_layer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc" / "name").write_text("x")
    (root / "link").symlink_to("etc/name")
    (root / "tmp").mkdir()
    (root / "tmp" / "rest").write_text("left over")
    return root


def packed(folder: Path, target: Path) -> Blob:
    pack_layer(folder, target)
    return Blob.of(target)


def test_a_layer_holds_files_and_links_but_no_scratch(folder: Path, tmp_path: Path) -> None:
    packed(folder, tmp_path / "layer.tar")
    with tarfile.open(tmp_path / "layer.tar") as tar:
        assert tar.getnames() == ["etc", "etc/name", "link", "tmp"]
        assert tar.getmember("link").linkname == "etc/name"
        assert tar.getmember("etc/name").uname == ""


@pytest.mark.needs_root
def test_a_deletion_becomes_a_whiteout(folder: Path, tmp_path: Path) -> None:
    import os
    import stat

    os.mknod(folder / "etc" / "gone", 0o000 | stat.S_IFCHR, os.makedev(0, 0))
    packed(folder, tmp_path / "layer.tar")
    with tarfile.open(tmp_path / "layer.tar") as tar:
        assert "etc/.wh.gone" in tar.getnames()


def test_an_image_file_holds_what_its_index_names(folder: Path, tmp_path: Path) -> None:
    layer = packed(folder, tmp_path / "layer.tar")
    config = ImageConfig(env={"A": "1"}, cmd=("run",), user="65532", ports=("8080",))
    image = Image("docker.io/x/y:dev", (layer,), config)
    image.write(tmp_path / "image.tar")
    with tarfile.open(tmp_path / "image.tar") as tar:

        def read(name: str) -> bytes:
            content = tar.extractfile(name)
            assert content is not None
            return content.read()

        entry = json.loads(read("index.json"))["manifests"][0]
        assert entry["annotations"] == {"io.containerd.image.name": "docker.io/x/y:dev"}
        assert entry["digest"] == image.digest
        manifest = json.loads(read("blobs/" + entry["digest"].replace(":", "/")))
        assert [part["digest"] for part in manifest["layers"]] == [layer.digest]
        described = json.loads(read("blobs/" + manifest["config"]["digest"].replace(":", "/")))
        assert described["config"] == {
            "Env": ["A=1"],
            "Cmd": ["run"],
            "WorkingDir": "/",
            "User": "65532",
            "ExposedPorts": {"8080/tcp": {}},
        }
        assert len(read("blobs/" + layer.digest.replace(":", "/"))) == layer.size


def test_layers_that_the_reader_has_are_left_out(folder: Path, tmp_path: Path) -> None:
    layer = packed(folder, tmp_path / "layer.tar")
    image = Image("docker.io/x/y:dev", (layer,), ImageConfig())
    image.write(tmp_path / "image.tar", present={layer.digest})
    with tarfile.open(tmp_path / "image.tar") as tar:
        assert "blobs/" + layer.digest.replace(":", "/") not in tar.getnames()


def test_the_digest_follows_from_the_content(folder: Path, tmp_path: Path) -> None:
    first = packed(folder, tmp_path / "a.tar")
    assert first.digest == packed(folder, tmp_path / "b.tar").digest
    assert Image("x", (first,), ImageConfig()).digest != Image("x", (first,), ImageConfig(user="1")).digest
