"""The cheap half of reading: input rows as bytes, with where they came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.text.conversations import Conversation, _lines, _read_row, _refuse_compressed
from draftmill.text.refusals import Refused, Source


@dataclass(frozen=True, slots=True)
class Raw:
    source: Source
    payload: bytes | dict[str, Any] | None  # None: a line over the limit


def read_raw(path: str | Path, max_line_bytes: int) -> Iterator[Raw]:
    with open(path, "rb") as file:
        _refuse_compressed(file, path)
        for source, line in _lines(file, str(path), max_line_bytes):
            yield Raw(source, line)


def parse_row(raw: Raw, max_line_bytes: int) -> Conversation | Refused | None:
    assert not isinstance(raw.payload, dict)
    return _read_row(raw.source, raw.payload, True, max_line_bytes)
