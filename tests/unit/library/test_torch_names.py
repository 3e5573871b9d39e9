"""Private names of torch stand in torch_compat alone, where a new version of torch is looked after."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import elastipod

PACKAGE = Path(elastipod.__file__).parent
OF_TORCH = ("torch", "dist", "nn", "dcp")


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.expr) -> str:
    """Give the name that an expression reads, without the arguments of calls in it; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return dotted(node.func)
    return node.id if isinstance(node, ast.Name) else ""


def private_torch_names(source: str) -> Iterator[str]:
    """Give the private names of torch that a module imports, or reads from one of torch's modules."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{each.name}" for each in node.names if is_private(f"{node.module}.{each.name}"))
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if name.split(".")[0] in OF_TORCH and is_private(name):
                yield name


def test_only_torch_compat_uses_private_names_of_torch() -> None:
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in PACKAGE.rglob("*.py")
        if (names := set(private_torch_names(path.read_text(encoding="utf-8"))))
    }
    assert set(found) == {"torch_compat.py"}


def test_private_names_are_found_however_they_are_used() -> None:
    assert list(private_torch_names("torch.finfo(self._types[0]).eps")) == []
    assert list(private_torch_names("torch.device(name)._private")) == ["torch.device._private"]
    assert list(private_torch_names("from torch.distributed.checkpoint.filesystem import _StorageInfo")) != []
    assert list(private_torch_names("from torch._tensor import Tensor")) != []
    assert list(private_torch_names("store = dist.distributed_c10d._get_default_store()")) != []
    assert list(private_torch_names("from torch import nn\nnn.Linear(1, 2)\nself._torch = torch.zeros(1)")) == []
