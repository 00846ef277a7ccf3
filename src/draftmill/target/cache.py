"""Key/value storage for rows of different lengths: an entry's index is its position in the row.

Before a forward pass, `place` says where the new entries go; `update` writes them there and returns all
entries up to the longest row. Entries that are stale (rejected drafts, padding, a shorter row's tail) are
never removed: the mask `key index <= query position` hides them until they are overwritten.

R rows, G key/value heads, S new entries per row, K visible entries, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class RaggedLayer(CacheLayerMixin):
    """Keys and values [R, G, capacity, D] of one layer. Grows; unwritten entries are zero, never garbage.

    (A masked garbage NaN would still poison the attention: 0 * NaN is NaN.)
    """

    is_sliding = False
    keys: Tensor  # type: ignore[assignment]  # None until the first write
    values: Tensor  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.length = 0  # entries returned by the last update

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros(*key_states.shape[:2], 0, key_states.shape[-1])
        self.values = value_states.new_zeros(*value_states.shape[:2], 0, value_states.shape[-1])
        self.is_initialized = True

    def write(
        self, keys: Tensor, values: Tensor, positions: Tensor, length: int, capacity: int
    ) -> tuple[Tensor, Tensor]:
        """Write [R, G, S, D] at `positions` [R, S]; return the first `length` entries [R, G, K, D]."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self._grow(max(length, capacity))
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        self.keys[rows, :, positions] = keys.transpose(1, 2)
        self.values[rows, :, positions] = values.transpose(1, 2)
        self.length = length
        return self.keys[:, :, :length], self.values[:, :, :length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise TypeError("a ragged layer has no order of its own: update the RaggedCache that holds it")

    def keep(self, rows: Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def _grow(self, entries: int) -> None:
        missing = entries - self.keys.shape[2]
        if missing > 0:
            missing = max(missing, self.keys.shape[2])  # doubling: growing entry by entry would copy quadratically
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, missing))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, missing))


class RaggedCache(Cache):
    """Usable as `past_key_values` of Hugging Face decoders, together with the 4D mask `visible()`.

    `capacity` is a hint: room taken at the first write, so that a known length never reallocates.
    """

    layers: list[RaggedLayer]  # type: ignore[assignment]

    def __init__(self, capacity: int = 0) -> None:
        super().__init__(layer_class_to_replicate=RaggedLayer)
        self.capacity = capacity
        self.positions: Tensor | None = None  # int64 [R, S], of the forward pass to come
        self.length = 0  # entries a forward pass sees: the longest row's last position + 1
        self._seen: int | None = 0  # entries before the forward pass to come; None where rows differ

    def place(self, positions: Tensor, starts: list[int]) -> None:
        """Say where the next forward pass writes: row r at starts[r], starts[r] + 1, ...

        `positions` int64 [R, S] is the same on the device; the host copy saves a synchronisation.
        """
        self.positions = positions
        self.length = max(starts) + positions.shape[1]
        self._seen = starts[0] if len(set(starts)) == 1 else None

    def visible(self) -> Tensor:
        """bool [R, 1, S, K]: causal by position, which also hides every stale entry."""
        assert self.positions is not None
        index = torch.arange(self.length, device=self.positions.device)
        return (index <= self.positions[..., None])[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.positions is None or self.positions.shape != (key_states.shape[0], key_states.shape[2]):
            placed = None if self.positions is None else tuple(self.positions.shape)
            raise ValueError(
                f"the cache was told to expect rows and entries {placed}, but layer {layer_idx} brings "
                f"{(key_states.shape[0], key_states.shape[2])}: call place() before each forward pass"
            )
        while len(self.layers) <= layer_idx:
            self.layers.append(RaggedLayer())
        return self.layers[layer_idx].write(key_states, value_states, self.positions, self.length, self.capacity)

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these, in this order."""
        self.positions = None
        for layer in self.layers:
            if layer.is_initialized:
                layer.keep(torch.tensor(rows, device=layer.device))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Entries before the forward pass to come, as Hugging Face counts them. Only where all rows agree."""
        if self._seen is None:
            raise ValueError(
                "rows of a ragged cache have different lengths: pass position_ids and the 4D mask visible()"
            )
        return self._seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1
