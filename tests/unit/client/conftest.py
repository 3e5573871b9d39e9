"""What the tests of the users' commands share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.client.fake_kubectl import FakeKubectl


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    """A kubectl that answers from a table."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return FakeKubectl(folder, monkeypatch)
