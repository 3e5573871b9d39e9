"""Ends the backward passes of a step whose world is over.

A rank that accumulates gradients without reducing them reaches no collective that would fail: it would compute for the rest of its passes
what nobody can use any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from elastipod.in_memory.members import Members
from elastipod.in_memory.memory_state import WorldLost

CHECKS = 16  # in each backward pass, at most


class PassWatch:
    """Checks, while gradients are accumulated, whether the step can still count.

    The hooks are on the model's parameters and not on its modules: torch.compile would trace those, and compile the model
    again for them.
    """

    def __init__(self, members: Members, is_lost: Callable[[], bool]) -> None:
        """is_lost: whether the step that is under way cannot count any more; False outside of steps."""
        self._members = members
        self._is_lost = is_lost
        self._handles: Sequence[RemovableHandle] = ()

    def begin(self) -> None:
        """Watch what the model trains now, until `close`."""
        self.close()
        trained = [each for each in self._members.model.parameters() if each.requires_grad]
        stride = -(-len(trained) // CHECKS) or 1
        self._handles = [each.register_post_accumulate_grad_hook(self._check) for each in trained[::stride]]  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = ()

    def _check(self, _: Tensor) -> None:
        if self._is_lost():
            raise WorldLost("the agent has ended the generation in a backward pass")
