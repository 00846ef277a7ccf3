"""The drafter over one pack: context, slots, loss sums. No host synchronisation, no gradient bookkeeping.

C context rows, F feature width, A blocks, B slots, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftmill.config.schema import LossConfig
from draftmill.config.spec import DrafterSpec
from draftmill.drafter.attention import attention, layer_masks
from draftmill.drafter.blocks import Blocks
from draftmill.drafter.network import Drafter, Rope
from draftmill.drafter.objective import ChunkTerms, FrozenHeadCrossEntropy, LossSums, chunk_terms, loss_sums
from draftmill.drafter.pack import DevicePack
from draftmill.drafter.vocabulary import FrozenVocabulary


def network(
    drafter: Drafter, features: Tensor, slots: Tensor, context_rope: Rope, rope: Rope, masks: Sequence[Any]
) -> Tensor:
    """All that has weights. `masks`: of `layer_masks`."""
    context = drafter.project(features)

    def join(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        context_keys, context_values = drafter.context_kv(layer, context, context_rope)
        return torch.cat((context_keys, keys), dim=-2), torch.cat((context_values, values), dim=-2)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, masks[layer])

    return drafter.blocks(slots, rope, join, attend)


def slot_hidden(
    drafter: Drafter, vocabulary: FrozenVocabulary, pack: DevicePack, features: Tensor, blocks: Blocks
) -> Tensor:
    """Features [C, F] in the compute dtype -> hidden states of the predicting slots [A, B - 1, H]."""
    ropes = drafter.rope(pack.positions), drafter.rope(blocks.positions.reshape(-1))
    slots = vocabulary.embed(blocks.token_ids.reshape(-1)).to(features.dtype)
    hidden = network(drafter, features, slots, *ropes, layer_masks(drafter.spec, blocks.layout))
    return predicting(hidden, drafter.spec)


def predicting(hidden: Tensor, spec: DrafterSpec) -> Tensor:
    """[Q, H] -> [A, B - 1, H]: slot 0 is never scored."""
    return hidden.view(-1, spec.block_size, spec.hidden_size)[:, 1:]


def block_loss(
    hidden: Tensor,
    vocabulary: FrozenVocabulary,
    blocks: Blocks,
    loss: LossConfig,
    gamma: float,
    terms: ChunkTerms = chunk_terms,
) -> LossSums:
    """Slot hidden states [A, B - 1, H] -> the pack's sums."""
    rows = hidden.flatten(0, 1)
    cross_entropy, hit = FrozenHeadCrossEntropy.apply(rows, vocabulary, blocks.labels.flatten(), terms)
    shape = blocks.labels.shape
    return loss_sums(cross_entropy.view(shape), hit.view(shape), blocks.counted, loss, gamma)
