"""Names that live in different places from torch 2.4 to today, found once."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel as DistributedDataParallel

try:
    from torch.distributed.fsdp import FSDPModule as FSDPModule
    from torch.distributed.tensor import DTensor as DTensor
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import FSDPModule as FSDPModule  # type: ignore[attr-defined]
    from torch.distributed._tensor import DTensor as DTensor  # type: ignore[attr-defined]
