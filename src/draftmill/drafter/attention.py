"""Attention of block slots over [context ; blocks]: dense SDPA on the CPU, flex_attention on a GPU.

Both read the same `BlockLayout.visible`. flex_attention has no backward on the CPU, and dense masks do not
scale on a GPU. Q = A * B queries, K = C + Q keys, N query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftmill.config.spec import DrafterSpec
from draftmill.drafter.network import Attend
from draftmill.drafter.tiles import block_mask, padded
from draftmill.drafter.visibility import BlockLayout, LayerRule


def attend_blocks(spec: DrafterSpec, layout: BlockLayout) -> Attend:
    """The attention of every layer over one pack. Masks are built once per kind of layer, not per layer."""
    rules = [LayerRule.of(spec, layer) for layer in range(spec.num_layers)]
    make_mask = block_mask if layout.anchor.is_cuda else BlockLayout.dense_mask
    masks = {rule: make_mask(layout, rule) for rule in dict.fromkeys(rules)}
    attention = _flex if layout.anchor.is_cuda else _dense

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q[None], k[None], v[None], masks[rules[layer]])[0]

    return attend


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """[1, N, Q, D] and [1, G, K, D], padded here to the mask's whole tiles."""
    queries = q.shape[-2]
    q, k, v = (F.pad(x, (0, 0, 0, padded(x.shape[-2]) - x.shape[-2])) for x in (q, k, v))
    return _compiled_flex()(q, k, v, block_mask=mask, enable_gqa=True)[..., :queries, :]


@cache
def _compiled_flex() -> Any:
    """flex_attention is fused only when compiled; `dynamic` makes one kernel for all shapes, and `fullgraph` an
    error of what would otherwise fall back, silently, to dense scores.
    """
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
