"""Optional noise on the target's features, counter-based like the anchors: a function of what it is added to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftmill.config.schema import NoiseConfig
from draftmill.drafter import counter_hash
from draftmill.drafter.pack import DevicePack


def add_noise(features: Tensor, pack: DevicePack, noise: NoiseConfig, seed: int) -> Tensor:
    """Features [C, F] plus noise, in the features' dtype; `noise.scale` is half width or standard deviation."""
    if noise.kind == "none":
        return features
    row = counter_hash.fold(
        counter_hash.NOISE, seed, pack.epoch, pack.document_id[pack.document], pack.positions, device=features.device
    )
    column = torch.arange(features.shape[1], device=features.device)
    first = _unit(counter_hash.mix((row[:, None] + counter_hash.mix(2 * column)) & counter_hash.MASK))
    if noise.kind == "uniform":
        drawn = noise.scale * (2 * first - 1)
    else:  # Box-Muller
        second = _unit(counter_hash.mix((row[:, None] + counter_hash.mix(2 * column + 1)) & counter_hash.MASK))
        drawn = noise.scale * torch.sqrt(-2 * torch.log(first)) * torch.cos(2 * math.pi * second)
    return features + drawn.to(features.dtype)


def _unit(draw: Tensor) -> Tensor:
    """32-bit integers -> float32 strictly inside (0, 1)."""
    return ((draw >> 9).float() + 0.5) * 2.0**-23
