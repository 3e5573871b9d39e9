"""Learning rates for jobs whose global batch changes with the world size. A constant global batch needs none of this."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from elastipod.errors import DataError

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LambdaLR

Rule = Literal["constant", "linear", "square-root"]


def rate_factor(rule: Rule, global_batch: int, base_batch: int) -> float:
    """Give the factor on the learning rate of ``base_batch`` when training with ``global_batch``. Raises ValueError."""
    if rule not in get_args(Rule):
        raise ValueError(f"rule is {rule!r}; there are {', '.join(get_args(Rule))}")
    if global_batch < 1 or base_batch < 1:
        raise ValueError(f"global_batch is {global_batch} and base_batch {base_batch}; both must be at least 1")
    ratio = global_batch / base_batch
    return {"constant": 1.0, "linear": ratio, "square-root": math.sqrt(ratio)}[rule]


class BatchScaledRate:
    """The factor on the learning rate at each step, with a linear ramp after each change of the global batch.

    Multiply it into a schedule: ``LambdaLR(optimizer, lambda step: cosine(step) * rate.factor(step))``. It depends only on the
    rule, the base batch and the resizes, so it is the same on all ranks. Keep `state_dict` in the checkpoint's ``extra``. At
    every start: create the schedule, load the checkpoint and this state, call `resized`, then `apply`.
    """

    def __init__(self, rule: Rule, base_batch: int, *, warm_up_steps: int = 0) -> None:
        """base_batch: the global batch of the schedule's own rate. warm_up_steps: length of the ramp to a new factor; 0: no ramp.

        Raises ValueError for an unknown rule or negative warm_up_steps.
        """
        if warm_up_steps < 0:
            raise ValueError(f"warm_up_steps is {warm_up_steps}; it must be at least 0")
        self._rule, self._base_batch, self._warm_up_steps = rule, base_batch, warm_up_steps
        self._since, self._from = 0, rate_factor(rule, base_batch, base_batch)
        self._to = self._from
        self._global_batch: int | None = None

    def resized(self, step: int, global_batch: int) -> None:
        """Set the global batch that is trained after ``step`` completed steps. Call it at the start of every generation.

        The first batch of a job has no ramp. A change during a ramp begins at the factor that the ramp has reached.
        """
        target = rate_factor(self._rule, global_batch, self._base_batch)
        if self._global_batch is None:
            self._since, self._from, self._to = step - self._warm_up_steps, target, target
        elif global_batch != self._global_batch:
            self._since, self._from, self._to = step, self.factor(step), target
        self._global_batch = global_batch

    def factor(self, step: int) -> float:
        """Give the factor for the step after ``step`` completed steps, which is how torch's LambdaLR counts."""
        done = step - self._since
        if not self._warm_up_steps or done >= self._warm_up_steps:
            return self._to
        return self._from + (self._to - self._from) * max(done, 0) / self._warm_up_steps

    @staticmethod
    def apply(schedule: LambdaLR) -> None:
        """Set the optimizer's learning rates for the next step; a schedule itself updates them only in its step().

        Raises TypeError for a schedule other than LambdaLR. Most other schedules compute a rate from the previous one, which must
        not contain this factor.
        """
        if not hasattr(schedule, "lr_lambdas"):
            raise TypeError(
                f"the rate of a {type(schedule).__name__} cannot be scaled; write the schedule as a function of the step, in "
                "LambdaLR(optimizer, lambda step: schedule(step) * rate.factor(step))"
            )
        from elastipod.torch_compat import set_last_learning_rates

        factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
        groups = schedule.optimizer.param_groups
        for group, base, factor in zip(groups, schedule.base_lrs, factors, strict=True):
            if hasattr(group["lr"], "fill_"):  # a tensor, which compiled optimizers keep a reference to
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor
        set_last_learning_rates(schedule, [group["lr"] for group in groups])

    def state_dict(self) -> dict[str, Any]:
        """Give the state as JSON values, the same on every rank."""
        return {"v": 1, "since": self._since, "from": self._from, "to": self._to, "global_batch": self._global_batch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of an earlier generation; call `resized` afterwards. Raises DataError when it is not such a state."""
        try:
            since, was, to = int(state_dict["since"]), float(state_dict["from"]), float(state_dict["to"])
            batch = state_dict["global_batch"]
            self._global_batch = None if batch is None else int(batch)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"this is no state of a BatchScaledRate: {error!r} in {str(state_dict)[:200]}") from error
        self._since, self._from, self._to = since, was, to
