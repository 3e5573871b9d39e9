"""What the fork server imports, and when its process may not be forked; each test in a fork of its own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from elastipod_agent.fork_server import preload
from elastipod_agent.fork_server.preload import NotForkable

VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"


def in_fork(action: Callable[[], Any]) -> Any:
    """Give the result of an action in a fork of this process, which has one thread; of a refusal its text."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            try:
                answer = action()
            except NotForkable as error:
                answer = f"refused: {error}"
            except BaseException:
                answer = traceback.format_exc()
            os.write(writing, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(preload, "MODULES", ("first_of_all", "not_there_at_all"))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    noting = f"import os\nSEEN = os.environ.get({VARIABLE!r})\n"
    for name in ("first_of_all", "wanted_by_user"):
        (tmp_path / f"{name}.py").write_text(noting)
    (tmp_path / "needs_more.py").write_text("import lost_and_gone\n")
    (tmp_path / "raises.py").write_text("raise KeyError('x')\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    return tmp_path


def test_modules_are_imported_in_order_and_the_users_missing_ones_are_noted(folder: Path) -> None:
    def body() -> Any:
        told: list[str] = []
        notes = preload.load(["wanted_by_user", "needs_more"], told.append)
        seen = [sys.modules[name].SEEN for name in ("first_of_all", "wanted_by_user")]
        return [told, notes, seen, VARIABLE in os.environ]

    assert in_fork(body) == [
        ["first_of_all", "not_there_at_all", "wanted_by_user", "needs_more"],
        ["needs_more is not preloaded: there is no module lost_and_gone"],
        ["1", "1"],
        False,
    ]


def test_a_variable_that_the_user_has_set_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")

    def body() -> Any:
        preload.load([], lambda name: None)
        return [sys.modules["first_of_all"].SEEN, os.environ[VARIABLE]]

    assert in_fork(body) == ["0", "0"]


@pytest.mark.parametrize(("module", "why"), [("raises", "KeyError: 'x'"), ("leaves", "SystemExit: 3")])
def test_an_import_that_fails_half_way_is_a_refusal_and_leaves_no_variable(folder: Path, module: str, why: str) -> None:
    def body() -> Any:
        try:
            preload.load([module], lambda name: None)
        except NotForkable as error:
            return [str(error), VARIABLE in os.environ]

    assert in_fork(body) == [f"importing {module} failed: {why}", False]


def test_of_the_library_every_public_name_is_loaded_that_can_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Library(ModuleType):
        __all__ = ("first", "for_newer_torch", "gone", "last")

        def __getattr__(self, name: str) -> object:
            asked.append(name)
            raise ImportError(name) if name == "for_newer_torch" else AttributeError(name)

    monkeypatch.setitem(sys.modules, "elastipod", Library("elastipod"))
    assert preload._load("elastipod") is None
    assert [name for name in asked if not name.startswith("_")] == ["first", "for_newer_torch", "gone", "last"]


def checked(before: Callable[[], object]) -> Any:
    def body() -> Any:
        own = {int(name) for name in os.listdir("/proc/self/fd")}
        sys.modules.pop("torch", None)
        kept = before()
        preload.check(own)
        return ["may be forked", kept is None]

    return in_fork(body)


def test_the_first_group_of_a_worker_does_not_search_what_is_installed_for_gloo() -> None:
    """As torch does from 2.15 on; earlier ones never search."""

    def prepared_and_connected() -> list[bool]:
        import torch.distributed as dist

        backend = dist.distributed_c10d.Backend
        searches = hasattr(backend, "_ensure_backend_registered")
        preload.register_gloo()
        search = importlib.metadata.entry_points = mock.Mock(return_value=())
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        of_torch = {"GLOO"} if searches else set()
        return [
            dist.get_backend() == "gloo",
            search.mock_calls == [],
            of_torch <= set(backend._plugins),
            "NCCL" in backend._plugins,
        ]

    assert in_fork(prepared_and_connected) == [True, True, True, False]


def test_only_the_gloo_of_torch_itself_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", SimpleNamespace(Backend=SimpleNamespace()))
    preload.register_gloo()  # a torch that does not search
    searching = SimpleNamespace(Backend=SimpleNamespace(_ensure_backend_registered=found.append))
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", searching)
    installed = [SimpleNamespace(name="gloo", value="their.gloo:register")]
    monkeypatch.setattr(
        preload, "entry_points", lambda group: installed if group == "torch.distributed.backends" else []
    )
    preload.register_gloo()
    assert found == [], "another package's would be loaded before all forks"
    installed[0].value = "torch.distributed.distributed_c10d:register"
    preload.register_gloo()
    assert found == ["gloo"]
    monkeypatch.delitem(sys.modules, "torch.distributed.distributed_c10d")
    preload.register_gloo()  # without torch
    assert found == ["gloo"]


def test_a_process_with_one_thread_and_files_only_may_be_forked(tmp_path: Path) -> None:
    def files() -> list[object]:
        return [open(tmp_path / "new", "w"), open(os.devnull), os.open(tmp_path, os.O_RDONLY)]

    assert checked(lambda: None) == ["may be forked", True]
    assert checked(files) == ["may be forked", False]


def test_a_thread_a_connection_and_a_device_in_use_are_refused() -> None:
    def threads() -> None:
        for _ in range(2):
            threading.Thread(target=threading.Event().wait, daemon=True).start()

    def device(name: str, is_initialized: bool) -> None:
        uses = SimpleNamespace(is_initialized=lambda: is_initialized)
        sys.modules["torch"] = SimpleNamespace(**{name: uses})  # type: ignore[assignment]

    assert checked(threads).startswith("refused: imported modules left 2 thread(s) running: ")
    assert checked(socket.socketpair).startswith("refused: imported modules left socket:[")
    assert checked(lambda: device("cuda", True)) == "refused: an imported module initialized cuda"
    assert checked(lambda: device("xpu", True)) == "refused: an imported module initialized xpu"
    assert checked(lambda: device("cuda", False)) == ["may be forked", True]
