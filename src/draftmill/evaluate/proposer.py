"""The drafter over a batch of rows: its context grows with verified features, and blocks are drafted on it.

Context and blocks share one cache in which index equals position. A block's entries at a, a + 1, ... are
overwritten by the features of the tokens that turn out to stand there, and the visibility rule (context
strictly before the anchor, own slots that exist) hides whatever has not been overwritten yet.

R rows, S context positions, Q slots, K visible entries, n tapped layers, H hidden size, N query heads,
D head width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftmill.drafter.network import Drafter
from draftmill.drafter.visibility import LayerRule, block_range, context_range
from draftmill.drafter.vocabulary import FrozenVocabulary
from draftmill.target.cache import RaggedCache


class Proposer:
    def __init__(self, drafter: Drafter, vocabulary: FrozenVocabulary, capacity: int) -> None:
        self.drafter = drafter
        self.spec = drafter.spec
        self.vocabulary = vocabulary
        self.cache = RaggedCache(capacity)
        self.rules = [LayerRule.of(drafter.spec, layer) for layer in range(drafter.spec.num_layers)]

    def extend(self, features: Tensor, positions: Tensor, starts: list[int]) -> None:
        """Add features [R, S, n * H] of the target at `positions` [R, S] to the context."""
        context = self.drafter.project(features)
        rope = self.drafter.rope(positions)
        self.cache.place(positions, starts)
        for layer in range(self.spec.num_layers):
            self.cache.update(*self.drafter.context_kv(layer, context, rope), layer)

    def logits(self, anchor_ids: list[int], anchors: list[int], sizes: list[int]) -> Tensor:
        """Draft logits [R, Q - 1, V] for anchor + 1 .. anchor + Q - 1, Q the largest size.

        Row r's block has `sizes[r]` slots; a bidirectional slot sees only slots that exist, so results past
        a row's own size are meaningless.
        """
        device = self.vocabulary.embedding.device
        slots = max(sizes)
        token_ids = torch.full((len(anchors), slots), self.spec.mask_token_id)
        token_ids[:, 0] = torch.tensor(anchor_ids)
        anchor = torch.tensor(anchors).to(device)[:, None]
        slot = torch.arange(slots, device=device)
        positions = anchor + slot
        self.cache.place(positions, anchors)
        masks = {
            rule: self._visible(rule, anchor, slot, torch.tensor(sizes).to(device)[:, None])
            for rule in dict.fromkeys(self.rules)
        }

        def join(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return self.cache.update(keys, values, layer)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            mask = masks[self.rules[layer]]
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)

        embedded = self.vocabulary.embed(token_ids.to(device))
        hidden = self.drafter.blocks(embedded, self.drafter.rope(positions), join, attend)
        return self.vocabulary.logits(hidden[:, 1:])

    def keep(self, rows: list[int]) -> None:
        self.cache.keep(rows)

    def _visible(self, rule: LayerRule, anchor: Tensor, slot: Tensor, size: Tensor) -> Tensor:
        """bool [R, 1, Q, K]; never empty: slot 0 exists and every slot sees it. `anchor` and `size` [R, 1]."""
        key = torch.arange(self.cache.length, device=slot.device)
        low, high = context_range(anchor, slot, torch.zeros_like(anchor), rule.window)  # [R, Q], [R, 1]
        context = (key >= low[..., None]) & (key < high[..., None])
        own = (key - anchor)[:, None]  # [R, 1, K], the slot that an entry holds
        low, high = block_range(slot, rule.block_size, rule.causal)
        block = (own >= low[:, None]) & (own < high[:, None]) & (own < size[..., None])
        return (context | block)[:, None]
