"""flex_attention's tiles of a pack, computed from the anchors by integer arithmetic, on the device.

A tile is TILE queries by TILE keys. For each, the rule's ranges tell whether no, every, or some (query, key)
pair is visible; only the last kind evaluates the mask. No dense mask exists and nothing is read back.

Queries and keys are padded to whole tiles, at least two: kernels for whole tiles are faster, and the compiler
makes one kernel for all sizes from two on. Padded queries see nothing; nobody sees padded keys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftmill.drafter.visibility import BlockLayout, LayerRule, block_range, context_range, visible

TILE = 128  # what Hopper's flex kernels want, forward and backward


def padded(length: int) -> int:
    """`length` rounded up to whole tiles, at least two."""
    return max(2, -(-length // TILE)) * TILE


def tile_tables(layout: BlockLayout, rule: LayerRule) -> tuple[Tensor, Tensor]:
    """(some, every): bool [query tiles, key tiles] after padding; a tile that is neither is skipped.

    `every` may be missed where a tile straddles context and blocks, never claimed wrongly.
    """
    device = layout.anchor.device
    queries = len(layout.anchor) * rule.block_size
    query = torch.arange(queries, device=device)
    block, slot = query // rule.block_size, query % rule.block_size
    context = context_range(layout.anchor[block], slot, layout.document_start[block], rule.window)
    own_low, own_high = (layout.block_start[block] + b for b in block_range(slot, rule.block_size, rule.causal))
    key_tile = torch.arange(0, padded(layout.context_rows + queries), TILE, device=device)
    some_context, every_context = _cover(*context, key_tile)
    some_block, every_block = _cover(own_low, own_high, key_tile)
    every = every_context | every_block
    return (some_context | some_block) & ~every, every


def _cover(low: Tensor, high: Tensor, key_tile: Tensor) -> tuple[Tensor, Tensor]:
    """bool [query tiles, key tiles]: some range [low, high) of the tile touches the keys, all its ranges hold them."""
    empty = high <= low
    padding = padded(len(low)) - len(low)
    far = torch.iinfo(torch.int64).max // 2

    def per_tile(bound: Tensor, where_empty: int, where_padded: int) -> Tensor:
        filled = F.pad(torch.where(empty, where_empty, bound), (0, padding), value=where_padded)
        return filled.view(-1, TILE, 1)

    # padded queries exist in no one's output: they neither ask for a tile nor stand in the way of a whole one
    some = (per_tile(low, far, far).amin(1) < key_tile + TILE) & (per_tile(high, -far, -far).amax(1) > key_tile)
    every = (per_tile(low, far, -far).amax(1) <= key_tile) & (per_tile(high, -far, far).amin(1) >= key_tile + TILE)
    return some, every & some


def mask_tables(layout: BlockLayout, rule: LayerRule) -> dict[str, Tensor]:
    """The tables of a BlockMask by its own names for them, forward and backward: int32 [1, 1, ..]."""
    some, every = tile_tables(layout, rule)
    tables: dict[str, Tensor] = {}
    for kind, table in (("", some), ("full_", every)):
        for side, rows in (("kv", table), ("q", table.T)):
            tables[f"{kind}{side}_num_blocks"], tables[f"{kind}{side}_indices"] = _packed(rows)
    return tables


def block_mask(layout: BlockLayout, rule: LayerRule, tables: dict[str, Tensor] | None = None) -> Any:
    """A flex_attention BlockMask over padded queries and keys; heads share it. `tables`: where they exist already."""
    from torch.nn.attention.flex_attention import BlockMask

    queries = len(layout.anchor) * rule.block_size
    # closes over bare tensors, which the compiler takes as inputs: new documents are no new function
    anchor, document_start, block_start = _with_inert_blocks(layout, rule, padded(queries))

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(anchor, document_start, block_start, rule, query, key)

    # what later versions of torch add to these has None for its default
    return BlockMask(
        **(tables or mask_tables(layout, rule)), BLOCK_SIZE=(TILE, TILE), mask_mod=mask,
        seq_lengths=(padded(queries), padded(layout.context_rows + queries)),
    )  # fmt: skip


def _with_inert_blocks(layout: BlockLayout, rule: LayerRule, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """The layout's tensors with a block for every padded query: no context, and slots behind all keys."""
    missing = -(-queries // rule.block_size) - len(layout.anchor)
    behind = torch.iinfo(torch.int32).max
    return (
        F.pad(layout.anchor, (0, missing)),
        F.pad(layout.document_start, (0, missing)),
        F.pad(layout.block_start, (0, missing), value=behind),
    )


def _packed(table: Tensor) -> tuple[Tensor, Tensor]:
    """bool [q, k] -> (count int32 [1, 1, q], chosen key tiles first int32 [1, 1, q, k]), the rest of a row arbitrary.

    Contiguous: the kernels take whole rows for granted.
    """
    rows, keys = table.shape
    key = torch.arange(keys, device=table.device, dtype=torch.int32).expand(rows, keys)
    place = torch.where(table, table.cumsum(-1) - 1, keys)  # behind the row for those not chosen
    order = torch.zeros(rows, keys + 1, dtype=torch.int32, device=table.device).scatter(-1, place, key)
    return table.sum(-1, dtype=torch.int32)[None, None], order[None, None, :, :keys].contiguous()
