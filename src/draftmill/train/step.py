"""The micro-step in eager mode: one pack in, gradients added to the masters, sums out. Dynamic shapes.

The other step modes of a GPU must equal this one; it is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftmill.config.schema import TrainConfig
from draftmill.drafter.anchors import draw_anchors
from draftmill.drafter.blocks import make_blocks
from draftmill.drafter.forward import block_loss, slot_hidden
from draftmill.drafter.network import Drafter
from draftmill.drafter.noise import add_noise
from draftmill.drafter.objective import LossSums
from draftmill.drafter.pack import to_device
from draftmill.drafter.vocabulary import FrozenVocabulary
from draftmill.train.gradients import FlatGradients
from draftmill.wire import Pack


@dataclass(frozen=True, slots=True, eq=False)
class EagerStep:
    drafter: Drafter
    vocabulary: FrozenVocabulary
    train: TrainConfig
    gamma: float  # decay length in slots
    gradients: FlatGradients  # of `drafter`

    def __call__(self, wire_pack: Pack, features: Tensor) -> LossSums:
        """Features [C, F] of the pack, on any device. Adds the gradient of the pack's numerator to `.grad`; the host
        does not wait for the device.
        """
        self.gradients.begin()
        spec, device = self.drafter.spec, self.drafter.fc.weight.device
        pack, features = to_device(wire_pack, device), features.to(device)
        anchor = draw_anchors(pack, self.train.seed)
        blocks = make_blocks(pack, anchor, spec.block_size, spec.mask_token_id)
        features = features.to(getattr(torch, self.train.dtype))
        features = add_noise(features, pack, self.train.noise, self.train.seed)
        hidden = slot_hidden(self.drafter, self.vocabulary, pack, features, blocks)
        sums = block_loss(hidden, self.vocabulary, blocks, self.train.loss, self.gamma)
        sums.numerator.backward()
        return sums
