"""Token rows laid end to end in a few arrays: what crosses from a worker process to the writer.

Always: row i owns `lengths[i]` token ids and `span_lengths[i]` span borders, in row order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from draftmill.text.render import TokenRow


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    token_ids: np.ndarray  # int32 [sum of lengths]
    lengths: np.ndarray  # int32 [n]
    spans: np.ndarray  # int32 [sum of span_lengths]: start, end, start, end, ... of supervised tokens
    span_lengths: np.ndarray  # int32 [n]
    sources: np.ndarray  # int32 [n]: number of the input file
    lines: np.ndarray  # int64 [n]: 1-based line of the input file

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(cls, rows: Iterable[tuple[TokenRow, int, int]]) -> Self:
        """`rows`: (row, number of its input file, its line)."""
        rows = list(rows)
        spans = [np.asarray(row.spans, dtype=np.int32).reshape(-1) for row, _, _ in rows]
        return cls(
            _joined([row.token_ids for row, _, _ in rows]),
            np.array([len(row.token_ids) for row, _, _ in rows], dtype=np.int32),
            _joined(spans),
            np.array([len(span) for span in spans], dtype=np.int32),
            np.array([source for _, source, _ in rows], dtype=np.int32),
            np.array([line for _, _, line in rows], dtype=np.int64),
        )

    @classmethod
    def join(cls, blocks: Iterable[RowBlock]) -> Self:
        blocks = list(blocks)
        columns = ("token_ids", "lengths", "spans", "span_lengths", "sources", "lines")
        return cls(*(np.concatenate([getattr(block, name) for block in blocks]) for name in columns))

    @property
    def supervised_tokens(self) -> int:
        return int((self.spans[1::2] - self.spans[0::2]).sum(dtype=np.int64))

    def digests(self) -> Iterator[bytes | memoryview]:
        """The bytes of every row in turn: both lengths as int64, token ids, spans."""
        heads = np.stack((self.lengths, self.span_lengths), axis=1).astype(np.int64).tobytes()
        ids, spans = memoryview(self.token_ids).cast("B"), memoryview(self.spans).cast("B")
        token = border = 0
        pairs = zip((4 * self.lengths).tolist(), (4 * self.span_lengths).tolist(), strict=True)
        for i, (length, span_length) in enumerate(pairs):
            yield heads[16 * i : 16 * i + 16]
            yield ids[token : token + length]
            yield spans[border : border + span_length]
            token, border = token + length, border + span_length


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int32), *arrays])
