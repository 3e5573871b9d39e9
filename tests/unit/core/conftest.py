"""What every test of the core holds beside what it asserts itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.core.checked_values import checked, checks_by_class

# They count the calls of a decision, or measure its time and memory; or people have written any text into the record.
UNCHECKED = ("test_bounds.py", "test_plan_scale.py", "test_record_edited_by_hand.py")
CLASSES = tuple(checks_by_class())


@pytest.fixture(scope="module", autouse=True)
def _values_are_checked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check each value of the core that is made, whatever the test looks at."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in CLASSES if request.path.name not in UNCHECKED else ():
            patch.setattr(kind, "__init__", checked(kind))
        yield
