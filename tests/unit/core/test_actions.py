"""What actions and Events say of themselves."""

from __future__ import annotations

import pytest

from elastipod_operator.core.actions import JobEvent
from elastipod_operator.core.reasons import AnyReason, OpenReason, Reason


@pytest.mark.parametrize(
    ("reason", "is_warning"),
    [
        (Reason.RESIZING, False),
        (Reason.DRAIN_SHORTENED, True),
        (Reason.FAILED, True),
        pytest.param(OpenReason("LogHang_loss"), True, id="an agent's reason of a fault"),
    ],
)
def test_an_event_has_the_severity_that_its_reason_documents(reason: AnyReason, is_warning: bool) -> None:
    assert JobEvent(reason, "text").is_warning is is_warning
