"""All gradients of a drafter, and the sums of its optimizer step, in one flat float32 tensor.

One tensor makes the exchange between drafters one all-reduce, and division, clip and finite check one kernel each.
The sums ride behind the gradients: numerator, denominator, then four counters per predicting slot.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Protocol

import torch
from torch import Tensor, nn

from draftmill.drafter.objective import LossSums


class Exchange(Protocol):
    """Adds up a flat tensor over all drafters, in place; every drafter gets the same bits."""

    def sum(self, flat: Tensor) -> None: ...


class Alone:
    """One drafter: its sums are everyone's."""

    def sum(self, flat: Tensor) -> None:
        pass


class FlatGradients:
    """Owns the memory of every `.grad` of `module`. Adding to a `.grad` adds to `flat`; nothing may replace one."""

    def __init__(self, module: nn.Module, slots: int) -> None:
        parameters = list(module.parameters())
        self._size = sum(parameter.numel() for parameter in parameters)
        self._sums = 2 + 4 * slots
        self._flat = torch.zeros(self._size + self._sums, device=parameters[0].device)
        start = 0
        for parameter in parameters:
            parameter.grad = self._flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    @property
    def gradient(self) -> Tensor:
        """float32 [all parameters], the sum of weight * CE differentiated."""
        return self._flat[: self._size]

    def exchange(self, sums: LossSums, exchange: Exchange) -> LossSums:
        """Gradients and `sums` of this drafter become those of all drafters together."""
        parts = [getattr(sums, field.name).detach().reshape(-1) for field in fields(sums)]
        torch.cat(parts, out=self._flat[self._size :])
        exchange.sum(self._flat)
        shared = self._flat[self._size :].clone().split([len(part) for part in parts])
        return LossSums(shared[0][0], shared[1][0], *shared[2:])

    def clear(self) -> None:
        self._flat.zero_()
