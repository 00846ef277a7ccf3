"""The counter-based 32-bit hash behind every random choice, in numpy.

A draw is a pure function of its purpose and its coordinates, so it does not depend on packing, rank,
worker or restart. The drafter holds the same function over torch tensors.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

_MASK = np.uint64(0xFFFFFFFF)


class Purpose(IntEnum):
    """First value of every hash, so that two purposes never share draws."""

    DOCUMENT_ORDER = 1
    PACK_ORDER = 2
    ANCHORS = 3
    NOISE = 4


def mix(value: np.ndarray) -> np.ndarray:
    """uint64 in [0, 2^32) -> uint64 in [0, 2^32), a bijection that scatters neighbours."""
    value = value ^ (value >> np.uint64(16))
    value = (value * np.uint64(0x21F0AAAD)) & _MASK
    value = value ^ (value >> np.uint64(15))
    value = (value * np.uint64(0x735A2D97)) & _MASK
    return value ^ (value >> np.uint64(15))


def hash32(*values: int | np.ndarray) -> np.ndarray:
    """mix(v0), then h = mix(h + v) for each further value, all mod 2^32; arrays broadcast."""
    result = np.zeros(1, dtype=np.uint64)
    for value in values:
        result = mix((result + (np.asarray(value).astype(np.uint64) & _MASK)) & _MASK)
    return result
