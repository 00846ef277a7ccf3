"""All gradients of a drafter, and the sums of its optimizer step, in one flat float32 tensor.

One tensor makes the exchange between drafters one all-reduce, and division, clip and finite check one kernel each.
The sums ride behind the gradients: numerator, denominator, then four counters per predicting slot; and behind these the
drafters' votes on what all must decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Protocol

import torch
from torch import Tensor, nn

from draftmill.drafter.objective import LossSums

VOTES = 2  # checks made, checks failed


class Exchange(Protocol):
    """Adds up a flat tensor over all drafters, in place; every drafter gets the same bits."""

    def sum(self, flat: Tensor) -> None: ...


class Alone:
    """One drafter: its sums are everyone's."""

    def sum(self, flat: Tensor) -> None:
        pass


def flat_order(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name as they lie in flat tensors: matrices first, then norms, which weight decay spares."""
    return dict(sorted(module.named_parameters(), key=lambda named: named[1].ndim == 1))


def views_of(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`flat`'s elements in the shapes of `like`, one after the other; the same memory."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


class FlatGradients:
    """Owns the memory of every `.grad` of `module`. Adding to a `.grad` adds to the flat one; nothing may replace it.

    Between two optimizer steps the tensor is stale: the first micro-step of a step either asks `begin` for zeros, or
    writes over everything with `put`.
    """

    def __init__(self, module: nn.Module, slots: int) -> None:
        parameters = list(flat_order(module).values())
        self._size = sum(parameter.numel() for parameter in parameters)
        self._flat = torch.zeros(self._size + 2 + 4 * slots + VOTES, device=parameters[0].device)
        self._votes = torch.zeros(VOTES, device=parameters[0].device)  # this drafter's
        self._counted = torch.zeros_like(self._votes)  # all drafters', of the last exchange
        self._views = views_of(self.gradient, parameters)
        for parameter, view in zip(parameters, self._views, strict=True):
            parameter.grad = view
        self.stale = False

    @property
    def gradient(self) -> Tensor:
        """float32 [all parameters], the sum of weight * CE differentiated."""
        return self._flat[: self._size]

    def begin(self) -> None:
        """Zeros to add to, where the step has none yet."""
        if self.stale:
            self.gradient.zero_()
            self.stale = False

    def put(self, gradients: Sequence[Tensor], first: bool) -> None:
        """Gradients in flat order, of any dtype: added, or with `first` in place of what is there."""
        if first:
            torch._foreach_copy_(self._views, list(gradients))
        else:
            torch._foreach_add_(self._views, list(gradients))

    def exchange(self, sums: LossSums, exchange: Exchange) -> LossSums:
        """Gradients and `sums` of this drafter become those of all drafters together."""
        self.begin()
        parts = [getattr(sums, field.name).detach().reshape(-1) for field in fields(sums)]
        torch.cat([*parts, self._votes], out=self._flat[self._size :])
        exchange.sum(self._flat)
        *shared, self._counted = self._flat[self._size :].clone().split([*map(len, parts), VOTES])
        return LossSums(shared[0][0], shared[1][0], *shared[2:])

    def vote(self, checks: int, failures: int) -> None:
        """What rides with the next exchanges: checks made so far, and of these failed."""
        self._votes.copy_(torch.tensor([checks, failures], dtype=torch.float32))

    def forget_votes(self) -> None:
        """A new question: nobody has voted on it."""
        self.vote(0, 0)
        self._counted.zero_()

    def votes(self) -> list[float]:
        """Of all drafters together, at the last exchange. The host waits for it."""
        return self._counted.tolist()
