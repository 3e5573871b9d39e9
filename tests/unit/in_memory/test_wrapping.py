"""DDP is made without sending what all ranks hold already."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from elastipod import torch_compat


class FakeDDP(nn.Module):
    """Notes how it was made."""

    def __init__(self, module: nn.Module, bucket_cap_mb: int = 25, init_sync: bool = True) -> None:
        super().__init__()
        self.init_sync, self.bucket_cap_mb = init_sync, bucket_cap_mb


class OldDDP(nn.Module):
    """Always sends."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.init_sync = True


class Plain(nn.Module):
    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1), persistent=persistent)


@pytest.mark.parametrize(
    ("wrap", "model", "is_sent"),
    [
        pytest.param(FakeDDP, Plain(), False, id="DDP itself"),
        pytest.param(partial(FakeDDP, bucket_cap_mb=1), Plain(), False, id="with options"),
        pytest.param(OldDDP, Plain(), True, id="an earlier torch"),
        pytest.param(lambda model: FakeDDP(model), Plain(), True, id="a function of the script"),
        pytest.param(FakeDDP, Plain(persistent=False), True, id="a buffer that is in no state_dict"),
    ],
)
def test_weights_are_sent_only_where_nobody_knows_that_they_are_the_same(
    monkeypatch: pytest.MonkeyPatch, wrap: Any, model: nn.Module, is_sent: bool
) -> None:
    monkeypatch.setattr(torch_compat, "DistributedDataParallel", OldDDP if wrap is OldDDP else FakeDDP)
    made = torch_compat.wrapped_as_it_is(wrap, model)
    assert made.init_sync == is_sent
