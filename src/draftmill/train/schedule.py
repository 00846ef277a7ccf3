"""The learning rate as a pure function of the step. No torch, no state: a resumed run cannot differ."""

from __future__ import annotations

import math

from draftmill.config.schema import TrainConfig


def learning_rate(step: int, total: int, train: TrainConfig) -> float:
    """Rate of 0-based optimizer step `step` of `total`.

    Warm-up rises linearly to `train.lr`, reached at the last warm-up step; then cosine, or stable and linear
    decay (wsd), to `train.min_lr_ratio * train.lr` at the last step.
    """
    if not 0 <= step < total:
        raise ValueError(f"step {step} is outside a run of {total} steps")
    warmup = round(train.warmup_ratio * total)
    if step < warmup:
        return train.lr * (step + 1) / warmup
    lowest = train.min_lr_ratio
    if train.schedule == "cosine":
        progress = (step - warmup) / max(1, total - 1 - warmup)
        return train.lr * (lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress)))
    decay = max(1, round(train.decay_ratio * total))
    left = total - 1 - step  # steps after this one
    return train.lr * (lowest + (1 - lowest) * min(1.0, left / decay))
