"""The Python of the user guide, cut out of its text, so that tests run what readers copy."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "user-guide.md"
BLOCKS: list[str] = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
LOOP, APPLY, VALIDATION, BUILD, SAVES, OBJECTS, LOADER, STATEFUL, ACCUMULATE, SUMMED, PADDED, RATE, MESH, LOG = BLOCKS


def stateful_script() -> str:
    """Give the script of the StatefulDataLoader, ended as the loop before it ends."""
    after = textwrap.dedent(LOADER[LOADER.index("        optimizer.step()") :]).replace("loader.total", "sampler.total")
    open_end = "    ...  # as above\n"
    assert STATEFUL.endswith(open_end)
    return STATEFUL.removesuffix(open_end) + textwrap.indent(after, "    ")


def function_of(script: str, folder: Path) -> str:
    """Give a script as the body of a function ``script``, for its ``return``; with shared storage in a folder and no workers."""
    script = script.replace("/mnt/shared", str(folder)).replace("num_workers=4", "num_workers=0")
    return f"def script():\n{textwrap.indent(script, '    ')}\n"
