"""Counter-based integer hash: draws that depend on what is drawn, never on who draws or when.

The same on CPU, GPU and in numpy (`text/hashing.py` is its twin): only int64 products below 2^63.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF  # 32 bits
ANCHOR, NOISE = 3, 4  # purposes, so that no two kinds of draw share numbers; `text/hashing.py` has 1 and 2


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers held in int64, any shape.

    Source: the two-round xorshift-multiply family by Wellons (hash prospector), constants 0x21f0aaad, 0x735a2d97.
    """
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & MASK
    return x ^ (x >> 15)


def fold(*values: Tensor | int, device: torch.device | str | None = None) -> Tensor:
    """32-bit hash of a sequence of 32-bit values, broadcast together, in int64."""
    state = torch.zeros((), dtype=torch.int64, device=device)
    for value in values:
        state = mix((state + value) & MASK)
    return state
