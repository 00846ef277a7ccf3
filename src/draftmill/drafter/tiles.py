"""flex_attention's tiles of a pack, computed from the anchors by integer arithmetic, on the device.

A tile is TILE queries by TILE keys. For each, the rule's ranges tell whether no, every, or some (query, key)
pair is visible; only the last kind evaluates the mask. No dense mask exists and nothing is read back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftmill.drafter.visibility import BlockLayout, LayerRule, block_range, context_range

TILE = 128  # what Hopper's flex kernels want, forward and backward


def tile_tables(layout: BlockLayout, rule: LayerRule) -> tuple[Tensor, Tensor]:
    """(some, every): bool [query tiles, key tiles]; a tile that is neither is skipped.

    `every` may be missed where a tile straddles context and blocks, never claimed wrongly.
    """
    device = layout.anchor.device
    queries = len(layout.anchor) * rule.block_size
    keys = layout.context_rows + queries
    query = torch.arange(queries, device=device)
    block, slot = query // rule.block_size, query % rule.block_size
    context = context_range(layout.anchor[block], slot, layout.document_start[block], rule.window)
    low, high = block_range(slot, rule.block_size, rule.causal)
    start = torch.arange(0, keys, TILE, device=device)  # first key of each key tile
    end = (start + TILE).clamp(max=keys)
    some_context, every_context = _cover(context, start, end)
    some_block, every_block = _cover((layout.block_start[block] + low, layout.block_start[block] + high), start, end)
    every = every_context | every_block
    return (some_context | some_block) & ~every, every


def _cover(seen: tuple[Tensor, Tensor], start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Per query tile: does some query's range touch the key tile [start, end), does every query's range hold it."""
    low, high = seen
    empty = high <= low
    far = torch.iinfo(torch.int64).max // 2
    padding = -len(low) % TILE
    # rows past the last query exist in no one's output: they may neither forbid nor ask for a tile
    lowest = F.pad(torch.where(empty, far, low), (0, padding), value=far).view(-1, TILE).amin(1)[:, None]
    highest = F.pad(torch.where(empty, -far, high), (0, padding), value=-far).view(-1, TILE).amax(1)[:, None]
    last_low = F.pad(torch.where(empty, far, low), (0, padding), value=-far).view(-1, TILE).amax(1)[:, None]
    first_high = F.pad(torch.where(empty, -far, high), (0, padding), value=far).view(-1, TILE).amin(1)[:, None]
    some = (lowest < end) & (highest > start)
    every = (last_low <= start) & (first_high >= end)
    return some, every


def block_mask(layout: BlockLayout, rule: LayerRule) -> Any:
    """A flex_attention BlockMask over [context ; blocks]; heads share it."""
    from torch.nn.attention.flex_attention import BlockMask

    some, every = tile_tables(layout, rule)
    queries = len(layout.anchor) * rule.block_size

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return layout.visible(rule, query, key)

    return BlockMask.from_kv_blocks(
        *_packed(some), *_packed(every), BLOCK_SIZE=(TILE, TILE), mask_mod=visible,
        seq_lengths=(queries, layout.context_rows + queries),
    )  # fmt: skip


def _packed(table: Tensor) -> tuple[Tensor, Tensor]:
    """bool [q, k] -> (count int32 [1, 1, q], chosen key tiles first int32 [1, 1, q, k])."""
    count = table.sum(-1, dtype=torch.int32)
    order = torch.argsort(table.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None], order[None, None]
