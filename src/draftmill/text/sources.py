"""Input files in, raw rows out: the cheap, sequential half of reading.

`read_raw` yields every row of a file in order, undecoded, with its place; `conversations.parse_row` does the
costly rest and may run in another process. Rows are plain picklable data. At most one line, and never more
than `max_line_bytes` of it, is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from draftmill.text.refusals import DropReason, Refused, Source

MAX_LINE_BYTES = 16 * 2**20

_BOM = b"\xef\xbb\xbf"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_SKIP_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Raw:
    source: Source
    payload: bytes | dict[str, Any] | None
    """A JSONL line without its ending, a table's row, or None where the row could not be read."""
    refused: Refused | None = None
    """Why it could not be read."""
    size: int = 0
    """About how many bytes the payload has."""


def read_raw(path: str | Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Raw]:
    with open(path, "rb") as file:
        _refuse_compressed(file, path)
        yield from _lines(file, str(path), max_line_bytes)


def _refuse_compressed(file: BinaryIO, path: str | Path) -> None:
    head = file.read(4)
    file.seek(0)
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise ValueError(f"{path} is {name}-compressed, which is not read: decompress it to plain JSONL first")


def _lines(file: BinaryIO, name: str, limit: int) -> Iterator[Raw]:
    number = offset = 0
    while True:
        line = file.readline(limit + 2)  # the ending, "\r\n" at most, is not counted
        if not line:
            return
        number += 1
        source = Source(name, number, offset)
        offset += len(line)
        ended = line.endswith(b"\n")
        body = line.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1:
            body = body.removeprefix(_BOM)
        if len(body) <= limit and (ended or len(line) < limit + 2):
            yield Raw(source, body, size=len(body))
            continue
        while not ended:
            rest = file.readline(_SKIP_BYTES)
            offset += len(rest)
            ended = rest.endswith(b"\n") or not rest
        yield Raw(source, None, Refused(DropReason.LINE_TOO_LONG, source, f"over {limit:,} bytes"))
