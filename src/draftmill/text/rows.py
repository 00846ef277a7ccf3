"""What packing asks of a set of token rows, and the smallest thing that answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np


class RowCounts(NamedTuple):
    """Per row, after truncation to the pack's length."""

    lengths: np.ndarray  # int64 [n]
    supervised: np.ndarray  # int64 [n]
    eligible: np.ndarray  # int64 [n]: positions a with a and a+1 supervised


class Rows(Protocol):
    """Numbered token rows; the number is the document's identity in hashes and in the ledger."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def earlier(self) -> Mapping[int, str]: ...  # fingerprint by number of rows, before the dataset grew

    @property
    def lengths(self) -> np.ndarray: ...  # int32 [n]

    def __len__(self) -> int: ...

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]: ...  # token_ids int32 [T], supervised bool [T]

    def counts(self, limit: int) -> RowCounts: ...


def spans_of(supervised: np.ndarray) -> np.ndarray:
    """bool [T] -> int32 [2 m]: start, end, start, end, ... of the runs of True."""
    edges = np.diff(np.concatenate(([False], supervised, [False])).astype(np.int8))
    return np.flatnonzero(edges).astype(np.int32)


def count_rows(lengths: np.ndarray, spans: np.ndarray, span_offsets: np.ndarray, limit: int) -> RowCounts:
    """`spans` [2 m] flat over all rows; row i owns spans[span_offsets[i] : span_offsets[i + 1]]."""
    clipped = np.minimum(spans.astype(np.int64), limit)
    size = clipped[1::2] - clipped[0::2]
    borders = span_offsets.astype(np.int64) // 2
    return RowCounts(
        lengths=np.minimum(lengths.astype(np.int64), limit),
        supervised=_sum_per_row(size, borders),
        eligible=_sum_per_row(np.maximum(size - 1, 0), borders),
    )


def _sum_per_row(values: np.ndarray, borders: np.ndarray) -> np.ndarray:
    total: np.ndarray = np.concatenate(([0], np.cumsum(values)))
    return np.asarray(total[borders[1:]] - total[borders[:-1]])


class InMemoryRows:
    """Rows held as arrays, for tests and small experiments."""

    def __init__(self, rows: Sequence[tuple[np.ndarray, np.ndarray]], fingerprint: str = "in-memory") -> None:
        self._rows = [(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.bool_)) for ids, mask in rows]
        self._spans = [spans_of(mask) for _, mask in self._rows]
        self.fingerprint = fingerprint
        self.earlier: dict[int, str] = {}
        self.lengths = np.array([len(ids) for ids, _ in self._rows], dtype=np.int32)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._rows[index]

    def counts(self, limit: int) -> RowCounts:
        offsets = np.concatenate(([0], np.cumsum([len(spans) for spans in self._spans])))
        flat = np.concatenate([np.zeros(0, dtype=np.int32), *self._spans])
        return count_rows(self.lengths, flat, offsets, limit)
