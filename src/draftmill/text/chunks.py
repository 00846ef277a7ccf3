"""Input rows in chunks of bounded size, and the pure work that makes token rows of one chunk.

    raw rows --> chunk --[parse, render, fit: in any process]--> Made --> writer

Always: the borders of chunks depend on the input alone; each input row of a chunk is kept, refused with one reason,
or blank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from draftmill.text.block import RowBlock
from draftmill.text.conversations import Conversation, parse_row
from draftmill.text.refusals import DropReason, Refused, Source
from draftmill.text.render import Renderer, TokenRow
from draftmill.text.sources import Raw

CHUNK_ROWS = 256
CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Chunk:
    raws: list[Raw]

    def __str__(self) -> str:
        return f"{self.raws[0].source} to {self.raws[-1].source}"


@dataclass(slots=True)
class Made:
    """What became of a chunk."""

    raws: int  # input rows, blank lines counted
    last: Source
    block: RowBlock
    kept: int = 0
    truncated: int = 0  # written rows that max_length cut
    turns_dropped: int = 0  # rows without an anchor beside a kept row of the same conversation
    refused: list[Refused] = field(default_factory=list)  # in input order


def in_chunks(raws: Iterable[Raw]) -> Iterator[Chunk]:
    """Up to 256 rows of about 1 MiB together; a chunk may exceed it by one row."""
    rows: list[Raw] = []
    size = 0
    for raw in raws:
        rows.append(raw)
        size += raw.size
        if len(rows) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield Chunk(rows)
            rows, size = [], 0
    if rows:
        yield Chunk(rows)


class MakeRows:
    """Picklable, without state between calls."""

    def __init__(self, renderer: Renderer, max_length: int | None, sources: Sequence[str], first: int = 0) -> None:
        """`first`: number of the first of `sources` among the dataset's input files."""
        self._renderer, self._max_length = renderer, max_length
        self._numbers = {name: first + i for i, name in enumerate(sources)}

    def __call__(self, chunk: Chunk) -> Made:
        rows: list[tuple[TokenRow, int, int]] = []
        made = Made(len(chunk.raws), chunk.raws[-1].source, RowBlock.of([]))
        for raw in chunk.raws:
            conversation = parse_row(raw)
            if conversation is None:
                continue
            fitted = conversation if isinstance(conversation, Refused) else self._rows(conversation)
            if isinstance(fitted, Refused):
                made.refused.append(fitted)
                continue
            made.kept += 1
            made.truncated += fitted.truncated
            made.turns_dropped += fitted.turns_dropped
            number = self._numbers[raw.source.file]
            rows += ((row, number, raw.source.line) for row in fitted.rows)
        made.block = RowBlock.of(rows)
        return made

    def _rows(self, conversation: Conversation) -> Fitted | Refused:
        rows = self._renderer.render(conversation)
        return rows if isinstance(rows, Refused) else fit(rows, conversation.source, self._max_length)


@dataclass(frozen=True, slots=True)
class Fitted:
    """The rows of a kept conversation."""

    rows: list[TokenRow]
    truncated: int
    turns_dropped: int


def fit(rows: list[TokenRow], source: Source, max_length: int | None) -> Fitted | Refused:
    """Cuts rows to `max_length` and leaves out those that no anchor fits in."""
    fitted = [(row, row.truncated(max_length)) for row in rows]
    usable = [(row, cut) for row, cut in fitted if cut.eligible]
    if not usable:
        cut_away = any(row.eligible for row in rows)
        reason = DropReason.TRUNCATED_AWAY if cut_away else DropReason.NO_ANCHOR
        return Refused(reason, source, f"max_length {max_length}" if cut_away else "")
    return Fitted(
        [cut for _, cut in usable],
        truncated=sum(len(cut.token_ids) < len(row.token_ids) for row, cut in usable),
        turns_dropped=len(rows) - len(usable),
    )
