"""What a script does between two steps that needs the other ranks, such as a validation."""

from __future__ import annotations

from types import TracebackType

from elastipod.errors import ElastipodError
from elastipod.in_memory.elastic_step import ElasticStep
from elastipod.in_memory.step_buffers import StepBuffers
from elastipod.in_memory.world_life import WorldLife


class BetweenSteps:
    """``with state.between_steps() as block:`` holds collectives of the script between two steps, such as those of a validation.

    A collective that fails because a peer is gone ends the block without an error. The completed step counts all the same; the buffers
    and positions in data are what they were before the block, and the loop goes on with the next world. Other errors pass.
    is_done: whether the block has ended whole on this rank; it need not have on the others.
    """

    def __init__(self, step: ElasticStep, world: WorldLife, buffers: StepBuffers) -> None:
        """step: the one beside which the block stands; the loop learns from it that the world is lost."""
        self.is_done = self._begins = False
        self._step = step
        self._world = world
        self._buffers = buffers

    def __enter__(self) -> BetweenSteps:
        self._begins = self._buffers.begin_block()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        lost_to = self._failure() if error is None else error
        if lost_to is not None and self._world.is_lost_to(lost_to):
            self._step.lost_to = self._step.lost_to or lost_to
            return True
        if self._begins:
            self._buffers.end_block()
        if error is None and lost_to is not None:
            raise lost_to
        self.is_done = error is None
        return False

    def _failure(self) -> Exception | None:
        """Wait for what an accelerator still computes of the block's collectives; give what is wrong with them."""
        try:
            self._world.await_gradients()
        except (RuntimeError, ElastipodError) as error:
            return error
        return None
