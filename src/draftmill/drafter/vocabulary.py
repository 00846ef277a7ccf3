"""The target's frozen embedding and head, as the drafter uses them. Never trained, never copied.

V vocabulary, H hidden size. Any leading shape is written `..`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FrozenVocabulary:
    """Embedding and head with the target's own scalings (its quirks), read once at load."""

    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H], the same storage as `embedding` where the target ties them
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        if self.embedding.shape != self.head.shape:
            raise ValueError(f"embedding {tuple(self.embedding.shape)} and head {tuple(self.head.shape)} differ")
        if self.embedding.requires_grad or self.head.requires_grad:
            raise ValueError("the target's embedding and head must be frozen (requires_grad False)")

    def to(self, device: torch.device) -> FrozenVocabulary:
        """Itself where it is on `device` already; else a copy there, tied or not as before."""
        if self.embedding.device == device:
            return self
        embedding = self.embedding.to(device)
        tied = self.head is self.embedding or self.head.data_ptr() == self.embedding.data_ptr()
        return replace(self, embedding=embedding, head=embedding if tied else self.head.to(device))

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [..] -> [.., H] in the embedding's dtype."""
        rows = F.embedding(token_ids, self.embedding)
        return rows if self.embedding_scale == 1.0 else rows * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., H] after the drafter's final norm -> [.., V], as the target would compute them."""
        return self.scale(hidden @ self.head.T)

    def scale(self, raw: Tensor) -> Tensor:
        """The target's treatment of raw logits: multiplier, then soft-cap."""
        if self.output_multiplier != 1.0:
            raw = raw * self.output_multiplier
        if self.logit_softcap is not None:
            raw = self.logit_softcap * torch.tanh(raw / self.logit_softcap)
        return raw
