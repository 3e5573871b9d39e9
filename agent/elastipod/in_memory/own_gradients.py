"""One rank's own gradients in one step, at some elements of each parameter, and how far rounding may carry what becomes of them.

An addition of floating-point numbers is off by half an eps of its result at most. So the sizes of all results are added up here: the
sum after each pass, and in a reduction what this rank gives to it, once for each rank that it may be added to. Half an eps of all that
is the most that rounding does, however far the passes cancel.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch

_FLUSHED = torch.finfo(torch.float32).tiny  # processors may take smaller numbers for zero


@dataclass(frozen=True, slots=True)
class Noted:
    """A parameter. elements: number of those that are noted. reduced_in: the type of all sums; None where it is the gradient's."""

    elements: int
    dtype: torch.dtype
    reduced_in: torch.dtype | None = None


class OwnGradients:
    """Sums over the passes of one step, float64 on the host. Parameters have numbers, in the order in which they were given."""

    def __init__(self, parameters: Sequence[Noted]) -> None:
        """Begin a step."""
        self._parameters = parameters
        self._dtypes = [
            each.dtype if each.reduced_in is None else _coarser(each.dtype, each.reduced_in) for each in parameters
        ]
        self._elements = [each.elements for each in parameters]
        # One row for all parameters each: few operations where the number of parameters is large.
        self._rows = torch.zeros(6, sum(self._elements), dtype=torch.float64, device="cpu")
        self._sum, self._size, self._rounded, self._before, self._dropped, self._dropped_size = self._rows
        self._parts = torch.split(self._rows, self._elements, dim=1)
        self._places = torch.split(torch.arange(self._rows.shape[1], device="cpu"), self._elements)
        self._noted: dict[int, torch.Tensor] = {}  # by parameter: of one pass, and not added yet
        self._passes, self._roundings = [0] * len(parameters), [0] * len(parameters)

    def has_passes(self, at: int) -> bool:
        """Whether a gradient of this parameter was noted in this step."""
        return self._passes[at] > 0

    def add(self, at: int, gradient: torch.Tensor) -> None:
        """Note the elements of the gradient of one more pass, which is added to those before."""
        if at in self._noted:
            self._add_noted()
        if self._parameters[at].reduced_in is None:
            self._dtypes[at] = _coarser(self._dtypes[at], gradient.dtype)
        self._noted[at] = gradient.detach()
        self._passes[at] += 1
        self._roundings[at] += 1

    def _add_noted(self) -> None:
        """Add what a pass has given for all its parameters at once: each operation, and each wait for a device, is one in place of many."""
        noted, self._noted = self._noted, {}  # at once: passes of several devices have a thread each
        if not noted:
            return
        values, places = on_host(list(noted.values())), torch.cat([self._places[at] for at in noted])
        total = self._sum[places] + values
        self._sum[places] = total
        self._size[places] += values.abs()
        self._rounded[places] += total.abs()

    def drop(self, at: int) -> None:
        """Let the next pass be the first of this parameter: nothing is left of the gradients of those before."""
        self._add_noted()
        part = self._parts[at]
        part[4:] += part[:2]
        part[:4] = 0.0
        self._roundings[at] = 0

    def reduced(self, roundings: int, which: Sequence[bool]) -> None:
        """Note that torch has reduced the passes so far of some parameters. roundings: of what this rank has given to each sum.

        DDP reduces once more what it has reduced before, FSDP2 only what came since: both sizes together are enough for either.
        """
        self._add_noted()
        is_reduced = self._of_elements([float(each) for each in which])
        self._rounded += roundings * is_reduced * (self._sum.abs() + self._before.abs())
        self._before += is_reduced * (self._sum - self._before)
        self._roundings = [number + 2 * roundings * each for number, each in zip(self._roundings, which, strict=True)]

    def announced(self, roundings: int) -> None:
        """Note that a script has added up and reduced all passes of the step, in an order of its own. roundings: as for `reduced`.

        Those too whose gradients it has taken away, as `fixed_order_passes` does after each pass.
        """
        self._add_noted()
        self._rows[:2] += self._rows[4:]
        self._rows[4:] = 0.0
        self._roundings = [passes + roundings for passes in self._passes]
        self._rounded.copy_(self._of_elements(self._roundings) * self._size)

    def told(self, unseen: Container[int] = ()) -> torch.Tensor:
        """Give what all ranks have to know, as rows: the sum, the sum of the passes' sizes, and the most that rounding may change.

        unseen: parameters for which this rank does not know them; all three are nan.
        """
        self._add_noted()
        limits = [torch.finfo(each) for each in self._dtypes]
        eps, tiny = (self._of_elements([getattr(each, name) for each in limits]) for name in ("eps", "tiny"))
        roundings = self._of_elements(self._roundings)
        # A number below `tiny` has fewer digits, so what is lost of it is as much as of `tiny`.
        most = eps / 2 * (self._rounded + roundings * tiny) + roundings * _FLUSHED
        found = torch.stack((self._sum, self._size, most))
        is_unseen = self._of_elements([float(at in unseen) for at in range(len(self._elements))])
        return found.masked_fill(is_unseen.bool(), torch.nan)

    def _of_elements(self, of_parameters: Sequence[float]) -> torch.Tensor:
        """Give a number of each parameter for each of its elements."""
        return torch.tensor(of_parameters, dtype=torch.float64, device="cpu").repeat_interleave(
            torch.tensor(self._elements, dtype=torch.int64, device="cpu")
        )


def on_host(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Give vectors end to end, float64 on the host."""
    if len({(each.device, each.dtype) for each in parts}) == 1:
        return torch.cat(list(parts)).cpu().double()
    none = torch.empty(0, dtype=torch.float64, device="cpu")
    return torch.cat([none, *(each.cpu().double() for each in parts)])


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return one if torch.finfo(one).eps >= torch.finfo(other).eps else other
