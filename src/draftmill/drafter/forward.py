"""The drafter over one pack: context, slots, loss sums. No host synchronisation, no gradient bookkeeping.

C context rows, F feature width, A blocks, B slots, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftmill.config.schema import LossConfig
from draftmill.drafter.attention import attend_blocks
from draftmill.drafter.blocks import Blocks
from draftmill.drafter.network import Drafter
from draftmill.drafter.objective import FrozenHeadCrossEntropy, LossSums, loss_sums
from draftmill.drafter.pack import DevicePack
from draftmill.drafter.vocabulary import FrozenVocabulary


def slot_hidden(
    drafter: Drafter, vocabulary: FrozenVocabulary, pack: DevicePack, features: Tensor, blocks: Blocks
) -> Tensor:
    """Features [C, F] in the compute dtype -> hidden states of the predicting slots [A, B - 1, H]."""
    spec = drafter.spec
    context = drafter.project(features)
    context_rope = drafter.rope(pack.positions)

    def join(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        context_keys, context_values = drafter.context_kv(layer, context, context_rope)
        return torch.cat((context_keys, keys), dim=-2), torch.cat((context_values, values), dim=-2)

    slots = vocabulary.embed(blocks.token_ids.reshape(-1)).to(features.dtype)
    rope = drafter.rope(blocks.positions.reshape(-1))
    hidden = drafter.blocks(slots, rope, join, attend_blocks(spec, blocks.layout))
    return hidden.view(-1, spec.block_size, spec.hidden_size)[:, 1:]


def block_loss(
    hidden: Tensor, vocabulary: FrozenVocabulary, blocks: Blocks, loss: LossConfig, gamma: float
) -> LossSums:
    """Slot hidden states [A, B - 1, H] -> the pack's sums."""
    cross_entropy, hit = FrozenHeadCrossEntropy.apply(hidden.flatten(0, 1), vocabulary, blocks.labels.flatten())
    shape = blocks.labels.shape
    return loss_sums(cross_entropy.view(shape), hit.view(shape), blocks.counted, loss, gamma)
