"""Input sources in, raw rows out: the cheap, sequential half of reading.

`read_raw` yields every row of a source in order, undecoded, with its place; `conversations.parse_row` does the costly
rest and may run in another process. Rows are plain picklable data. A source is a JSONL file, plain or compressed, a
Parquet or Arrow file, a dataset folder, or a dataset of the hub; its first bytes tell, not its name. In memory are at
most one line, never more than `max_line_bytes` of it, or one small record batch.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from draftmill.text.refusals import DropReason, Refused, Source

MAX_LINE_BYTES = 16 * 2**20
HUB = "hub:"

_BOM = b"\xef\xbb\xbf"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_ARROW = (b"ARROW1", b"\xff\xff\xff\xff")  # of the file and the stream format
_DATASET_MARKS = ("state.json", "dataset_dict.json")  # files of a folder that datasets' save_to_disk wrote
_SKIP_BYTES = 2**20
_ZSTD_BUFFER = 2**16  # where a file is cut short, as much as a buffer of what came before is lost with it


@dataclass(frozen=True, slots=True)
class Raw:
    source: Source
    payload: bytes | dict[str, Any] | None
    """A JSONL line without its ending, a table's row, or None where the row could not be read."""
    refused: Refused | None = None
    """Why it could not be read."""
    size: int = 0
    """About how many bytes the payload has."""


def read_raw(source: str | Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Raw]:
    """Raises ValueError where the source as a whole cannot be read."""
    name = str(source)
    check_source(name)
    if name.startswith(HUB) or os.path.isdir(name):
        return _table_rows(name, max_line_bytes)
    with open(name, "rb") as file:
        head = file.read(8)
    if head.startswith(b"PAR1") or head.startswith(_ARROW):
        return _table_rows(name, max_line_bytes)
    return _line_rows(name, head, max_line_bytes)


def check_source(source: str | Path) -> None:
    """Raises ValueError unless the source is there."""
    name = str(source)
    if name.startswith(HUB):
        split_hub_name(name)
    elif os.path.isdir(name):
        if not any(os.path.isfile(os.path.join(name, mark)) for mark in _DATASET_MARKS):
            raise ValueError(f"{name} is a folder, but not one that datasets' save_to_disk wrote: name files instead")
    elif not os.path.exists(name):
        raise ValueError(f"input file {name} does not exist or is not a file")


def split_hub_name(name: str) -> tuple[str, str | None, str | None, str | None]:
    """owner/name, config, revision, split."""
    rest, _, split = name.removeprefix(HUB).partition(":")
    rest, _, revision = rest.partition("@")
    parts = rest.split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise ValueError(f"{name} does not name a dataset: write {HUB}owner/name[/config][@revision][:split]")
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None, revision or None, split or None


def source_files(source: str | Path) -> list[str]:
    """The files on this machine that the source is read from; none where it is streamed from the hub."""
    name = str(source)
    if name.startswith(HUB):
        return []
    if os.path.isdir(name):
        return sorted(str(path) for path in Path(name).rglob("*") if path.is_file())
    return [name]


def _line_rows(name: str, head: bytes, limit: int) -> Iterator[Raw]:
    with open(name, "rb") as file:
        if head.startswith(_GZIP):
            stream: BinaryIO = cast(BinaryIO, gzip.GzipFile(fileobj=file))
        elif head.startswith(_ZSTD):
            import pyarrow as pa

            stream = io.BufferedReader(cast(io.RawIOBase, pa.CompressedInputStream(file, "zstd")), _ZSTD_BUFFER)
        else:
            _refuse_array(name, head)
            yield from _lines(file, name, limit, None)
            return
        yield from _lines(stream, name, limit, file.tell)


def _refuse_array(name: str, head: bytes) -> None:
    if name.endswith(".json") and head.removeprefix(_BOM).lstrip().startswith(b"["):
        raise ValueError(f"{name} is one JSON array: write one row per line, for instance with jq -c '.[]'")


def _lines(file: BinaryIO, name: str, limit: int, position: Callable[[], int] | None) -> Iterator[Raw]:
    """`position` tells how far a compressed file has been read; None: offsets are those of the lines."""
    number = offset = 0
    while True:
        number += 1
        source = Source(name, number, offset if position is None else position())
        try:
            line = file.readline(limit + 2)  # the ending, "\r\n" at most, is not counted
            if not line:
                return
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
        except (EOFError, OSError, zlib.error) as error:
            if position is None:
                raise
            yield Raw(source, None, Refused(DropReason.CUT_SHORT, source, str(error)[:200]))
            return
        yield Raw(source, None, Refused(DropReason.LINE_TOO_LONG, source, f"over {limit:,} bytes"))


def _table_rows(name: str, limit: int) -> Iterator[Raw]:
    from draftmill.text import tables

    total = sum(os.path.getsize(file) for file in source_files(name))
    if name.startswith(HUB):
        batches, rows = tables.hub_batches(name)
    elif os.path.isdir(name):
        batches, rows = tables.saved_dataset_batches(name)
    else:
        with open(name, "rb") as file:
            parquet = file.read(4) == b"PAR1"
        batches, rows = tables.parquet_batches(name) if parquet else tables.arrow_batches(name)
    number = 0
    try:
        for row, size in tables.rows_of(batches, limit):
            source = Source(name, number + 1, total * number // rows if rows else 0)
            number += 1
            refused = None if row is not None else Refused(DropReason.LINE_TOO_LONG, source, f"over {limit:,} bytes")
            yield Raw(source, row, refused, size)
    except tables.BrokenTable as error:
        source = Source(name, number + 1, total)
        yield Raw(source, None, Refused(DropReason.CUT_SHORT, source, str(error)))
