"""The target over a batch of rows: prefill, then forward passes at each row's own position.

R rows, S tokens per row and pass, n tapped layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftmill.target.cache import RaggedCache
from draftmill.target.model import Target

# (features [R, S, n * H], positions int64 [R, S], first position of each row)
OnFeatures = Callable[[Tensor, Tensor, list[int]], None]

PREFILL_TOKENS = 2048  # tokens of one prefill pass over all rows: bounds its logits, [tokens, V]


class Verifier:
    """Holds the target's cache. Rows are addressed by their place in the batch; `keep` drops some."""

    def __init__(self, target: Target, capacity: int) -> None:
        self.target = target
        self.cache = RaggedCache(capacity)

    def prefill(self, prompts: list[list[int]], on_features: OnFeatures | None = None) -> Tensor:
        """Read the prompts, in pieces; return the logits [R, V] after each prompt's last token.

        Shorter rows are padded on the right: what the padding leaves in the caches is stale and never seen.
        """
        longest = max(map(len, prompts))
        padded = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = torch.tensor(prompt)
        piece = max(1, PREFILL_TOKENS // len(prompts))
        last: list[Tensor | None] = [None] * len(prompts)
        for start in range(0, longest, piece):
            starts = [start] * len(prompts)
            logits, features, positions = self.forward(padded[:, start : start + piece], starts)
            if on_features is not None:
                on_features(features, positions, starts)
            for row, prompt in enumerate(prompts):
                if start < len(prompt) <= start + piece:
                    last[row] = logits[row, len(prompt) - 1 - start].clone()
        return torch.stack([row for row in last if row is not None])

    def forward(self, token_ids: Tensor, starts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """int64 [R, S], row r at positions starts[r].. -> logits [R, S, V], features [R, S, n * H], positions."""
        device = self.target.device
        positions = torch.tensor(starts)[:, None] + torch.arange(token_ids.shape[1])
        token_ids, positions = token_ids.to(device), positions.to(device)
        self.cache.place(positions, starts)
        logits, features = self.target.forward(token_ids, positions, self.cache, self.cache.visible())
        return logits, features, positions

    def keep(self, rows: list[int]) -> None:
        self.cache.keep(rows)
