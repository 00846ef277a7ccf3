"""Which keys a block slot may see: the one rule behind the dense mask, the flex kernel and the tiles.

A query is (anchor a, slot k). Documents are contiguous in a pack, so what it sees is two ranges:

    context   [max(document_start, a + k - W + 1), a)     strictly before the anchor, inside the document
    own block [0, k + 1) if causal, else [0, B)           never another block

W is the layer's window, the query itself counted; a full layer has no window. The anchor's own feature row
is not visible: at inference the target has not computed it yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftmill.config.spec import DrafterSpec

Range = tuple[Tensor, Tensor]


def context_range(anchor: Tensor, slot: Tensor, document_start: Tensor, window: int | None) -> Range:
    """Half-open range of visible context rows, elementwise on integer tensors; empty where low >= high."""
    low = document_start
    if window is not None:
        low = torch.maximum(low, anchor + slot - window + 1)
    return low, anchor


def block_range(slot: Tensor, block_size: int, causal: bool) -> Range:
    """Half-open range of visible slots of the query's own block, elementwise on integer tensors."""
    return torch.zeros_like(slot), slot + 1 if causal else torch.full_like(slot, block_size)


@dataclass(frozen=True, slots=True)
class LayerRule:
    """The rule's constants for one kind of layer."""

    window: int | None
    causal: bool
    block_size: int

    @classmethod
    def of(cls, spec: DrafterSpec, layer: int) -> LayerRule:
        return cls(spec.window(layer), spec.causal(layer), spec.block_size)


@dataclass(frozen=True, slots=True, eq=False)
class BlockLayout:
    """Where the blocks of a pack sit. Queries are block-major: query q is slot q mod B of block q div B.

    Keys are [context rows 0..C-1 ; block slots C..C + A*B - 1], A blocks, C context rows.
    """

    anchor: Tensor  # int64 [A], ascending context rows
    document_start: Tensor  # int64 [A], first context row of the anchor's document
    block_start: Tensor  # int64 [A], first key of the block: C + block * B
    context_rows: int  # C

    @classmethod
    def of(cls, anchor: Tensor, document_start: Tensor, context_rows: int, block_size: int) -> BlockLayout:
        block_start = context_rows + block_size * torch.arange(len(anchor), device=anchor.device)
        return cls(anchor, document_start, block_start, context_rows)

    def visible(self, rule: LayerRule, query: Tensor, key: Tensor) -> Tensor:
        """bool, elementwise on broadcastable int64 query and key indices."""
        return visible(self.anchor, self.document_start, self.block_start, rule, query, key)

    def dense_mask(self, rule: LayerRule) -> Tensor:
        """bool [A * B, C + A * B], True where the query sees the key."""
        queries = len(self.anchor) * rule.block_size
        index = torch.arange(self.context_rows + queries, device=self.anchor.device)
        return self.visible(rule, index[:queries, None], index[None, :])


def visible(
    anchor: Tensor, document_start: Tensor, block_start: Tensor, rule: LayerRule, query: Tensor, key: Tensor
) -> Tensor:
    """`BlockLayout.visible` over its bare tensors: what a compiled kernel evaluates, pair by pair."""
    block, slot = query // rule.block_size, query % rule.block_size
    # an anchor is a context row, so this range never reaches the blocks' keys
    context_low, context_high = context_range(anchor[block], slot, document_start[block], rule.window)
    block_low, block_high = block_range(slot, rule.block_size, rule.causal)
    own = key - block_start[block]
    return ((key >= context_low) & (key < context_high)) | ((own >= block_low) & (own < block_high))
