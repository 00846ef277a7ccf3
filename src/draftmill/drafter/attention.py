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
from draftmill.drafter.tiles import block_mask
from draftmill.drafter.visibility import BlockLayout, LayerRule


def attend_blocks(spec: DrafterSpec, layout: BlockLayout) -> Attend:
    """The attention of every layer over one pack. Masks are built once per kind of layer, not per layer."""
    rules = [LayerRule.of(spec, layer) for layer in range(spec.num_layers)]
    if layout.anchor.is_cuda:
        masks = {rule: block_mask(layout, rule) for rule in dict.fromkeys(rules)}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _compiled_flex()(q[None], k[None], v[None], block_mask=masks[rules[layer]], enable_gqa=True)[0]
    else:
        masks = {rule: layout.dense_mask(rule) for rule in dict.fromkeys(rules)}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = masks[rules[layer]]
            return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]

    return attend


@cache
def _compiled_flex() -> Any:
    """flex_attention is fused only when compiled; `dynamic` keeps one kernel for all shapes."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)
