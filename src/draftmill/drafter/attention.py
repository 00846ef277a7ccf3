"""Attention of block slots over [context ; blocks]: dense SDPA on the CPU, flex_attention on a GPU.

Both read the same `BlockLayout.visible`. flex_attention has no backward on the CPU, and dense masks do not
scale on a GPU. Q = A * B queries, K = C + Q keys, N query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from draftmill.config.spec import DrafterSpec
from draftmill.drafter.tiles import block_mask, padded
from draftmill.drafter.visibility import BlockLayout, LayerRule


def layer_rules(spec: DrafterSpec) -> list[LayerRule]:
    """The kinds of layer that a drafter has, each once."""
    return list(dict.fromkeys(LayerRule.of(spec, layer) for layer in range(spec.num_layers)))


def layer_masks(spec: DrafterSpec, layout: BlockLayout, tables: Sequence[dict[str, Tensor]] | None = None) -> list[Any]:
    """What `attention` asks for, a mask per layer: built once per kind of layer and shared.

    `tables`: of `tiles.mask_tables` for each of `layer_rules`, where they exist already.
    """
    rules = layer_rules(spec)
    if layout.anchor.is_cuda:
        made = [block_mask(layout, rule, tables[i] if tables else None) for i, rule in enumerate(rules)]
    else:
        made = [layout.dense_mask(rule) for rule in rules]
    return [made[rules.index(LayerRule.of(spec, layer))] for layer in range(spec.num_layers)]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """[N, Q, D], [G, K, D], [G, K, D] -> [N, Q, D], each query over the keys that `mask` shows it."""
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]
    queries = q.shape[-2]
    q, k, v = (F.pad(x, (0, 0, 0, padded(x.shape[-2]) - x.shape[-2])) for x in (q, k, v))
    flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    return flex(q[None], k[None], v[None], block_mask=mask, enable_gqa=True)[0, :, :queries]


@cache
def _compiled_flex() -> Any:
    """flex_attention is fused only when compiled; `dynamic` makes one kernel for all shapes, and `fullgraph` an
    error of what would otherwise fall back, silently, to dense scores.
    """
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
