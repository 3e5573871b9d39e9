"""Environments of peers: made once, whole, and anew when what they hold has changed."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest
from tests import peers
from tests.nonempty import every


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache and a checkout of this test's own, with the requirements of a peer named `small`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "peer-small.txt").write_text("small==1\n")
    return tmp_path


def make(requirements: Path, folder: Path) -> None:
    """Take a moment, as an installation does, and note that it was made."""
    folder.mkdir()
    (folder / "half").touch()
    time.sleep(0.3)
    (folder / "half").unlink()
    (folder / f"made by {os.getpid()}").write_text(requirements.read_text())


def keep(_: int = 0) -> list[str]:
    """Give what the environment holds."""
    folder = peers._kept("small", "any", make)
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(("made", "half")))


def test_an_environment_is_made_once_by_whoever_is_first(cache: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        seen = pool.map(keep, range(4))
        pool.close()  # the end of the block kills processes, and one that dies in the queue can leave another waiting there for ever
        pool.join()
    assert every(len(names) == 1 for names in seen), "never half made"
    assert len({names[0] for names in seen}) == 1


def test_half_an_environment_is_made_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(requirements: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise RuntimeError("the index does not answer")

    with pytest.raises(RuntimeError, match="does not answer"):
        peers._kept("small", "any", fail)
    assert keep() == [f"made by {os.getpid()}"]


def test_other_requirements_make_another_environment(cache: Path) -> None:
    first = peers._kept("small", "any", make)
    (cache / "requirements" / "peer-small.txt").write_text("small==2\n")
    second = peers._kept("small", "any", make)
    assert first != second
    assert first.is_dir(), "a run that uses it goes on"
    assert peers._kept("small", "any", make) == second


def test_what_nobody_asked_for_in_a_long_time_is_deleted(cache: Path) -> None:
    first = peers._kept("small", "any", make)
    old = time.time() - (peers.UNUSED_DAYS + 1) * 86400
    os.utime(first / ".complete", (old, old))
    second = peers._kept("small", "other", make)
    assert not first.exists()
    assert second.is_dir()


def test_an_unknown_peer_is_refused_by_name(cache: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no peer 'large'; known are small"):
        peers.peer_python("large")


@pytest.mark.parametrize("name", ["original", "torch211"])
def test_pins_carry_hashes_and_no_address(name: str) -> None:
    text = peers.peer_requirements(name).read_text()
    assert "==" in text
    assert "--hash=sha256:" in text
    assert "://" not in text
    assert "torch==2.11.0" in text
