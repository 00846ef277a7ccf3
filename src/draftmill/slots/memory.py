"""The memory behind slots. Made once, zeroed, addressed by number; only finite features enter.

C tokens of capacity, F feature width.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LocalSlots:
    """Slots of one process: the features of one pack each."""

    def __init__(self, count: int, capacity: int, feature_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._features = torch.zeros(count, capacity, feature_size, dtype=dtype, device=device)

    def write(self, slot: int, features: Tensor) -> None:
        """Copy features [T, F], T <= C, into `slot`."""
        capacity, width = self._features.shape[1:]
        if features.ndim != 2 or features.shape[1] != width or len(features) > capacity:
            raise ValueError(f"features {tuple(features.shape)} do not fit a slot of [{capacity}, {width}]")
        self._features[slot, : len(features)].copy_(features)

    def read(self, slot: int, tokens: int) -> Tensor:
        """A view [tokens, F] of `slot`, valid until the slot is freed."""
        return self._features[slot, :tokens]
