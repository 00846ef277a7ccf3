"""Input files, row by row, without looking into the rows: cheap, sequential, bounded.

    JSONL (.gz, .zst)  -> bytes of a line, None for one that is too long
    Parquet, Arrow     -> a dict per row
    dataset folder, hub:OWNER/NAME[:SPLIT] -> a dict per row, through the `datasets` library

Each line or row gives exactly one `Raw`, in file order. At most one line, or one record batch, is in memory.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from draftmill.text.refusals import Source

MAX_LINE_BYTES = 16 * 2**20
HUB = "hub:"
BATCH_ROWS = 256  # rows of a columnar file that are in memory at a time

_BOM = b"\xef\xbb\xbf"
_GZIP, _ZSTD, _PARQUET, _ARROW_FILE = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1", b"ARROW1"
_ARROW_STREAM = b"\xff\xff\xff\xff"
_SKIP_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Raw:
    """One input row as it lies in its file."""

    source: Source
    payload: bytes | dict[str, Any] | None  # a line, a row of a columnar file; None: a line over the limit
    damage: str | None = None  # why nothing can be read from here to the file's end


def is_dataset(name: str) -> bool:
    """A folder that `datasets` saved, or one on the hub; everything else is a file."""
    return name.startswith(HUB) or Path(name).is_dir()


def check_exists(name: str) -> None:
    """Raises ValueError with what can be given."""
    if not name.startswith(HUB) and not Path(name).exists():
        raise ValueError(
            f"input {name} does not exist: give a JSONL, Parquet or Arrow file, a folder that `datasets` saved, or "
            f"{HUB}OWNER/NAME[:SPLIT]"
        )


def size_in_bytes(name: str) -> int:
    """Of the file, for progress; 0 where there is none."""
    return 0 if is_dataset(name) else Path(name).stat().st_size


def read_raw(name: str | Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Raw]:
    """All rows of one input. Raises ValueError for what is no such input, OSError for what cannot be read."""
    name = str(name)
    check_exists(name)
    if is_dataset(name):
        yield from _numbered(name, _dataset_rows(name))
        return
    with open(name, "rb") as file:
        head = file.read(6)
    if head.startswith((_PARQUET, _ARROW_FILE, _ARROW_STREAM)):
        yield from _numbered(name, _columnar_rows(name, head))
        return
    with open(name, "rb") as file, _decompressed(file, head) as lines:
        yield from _lines(lines, name, max_line_bytes)


def _numbered(name: str, rows: Iterable[dict[str, Any]]) -> Iterator[Raw]:
    for number, row in enumerate(rows, 1):
        yield Raw(Source(name, number, 0), row)


def _dataset_rows(name: str) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{name} is read through the datasets library: pip install 'draftmill[datasets]'") from None
    if name.startswith(HUB):
        owner_name, _, split = name.removeprefix(HUB).partition(":")
        try:
            loaded = datasets.load_dataset(owner_name, split=split or "train", streaming=True)
        except Exception as error:  # the hub's, the network's, the dataset script's
            raise ValueError(f"{name} cannot be loaded: {type(error).__name__}: {error}"[:500]) from None
        return iter(loaded)
    try:
        loaded = datasets.load_from_disk(name)
    except Exception as error:
        raise ValueError(f"{name} is no dataset that `datasets` saved: {error}"[:500]) from None
    if isinstance(loaded, datasets.DatasetDict):
        raise ValueError(f"{name} holds several splits ({', '.join(loaded)}): give the folder of one, as {name}/train")
    return iter(loaded)


def _columnar_rows(name: str, head: bytes) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if head.startswith(_PARQUET):
            batches: Iterable[Any] = pq.ParquetFile(name).iter_batches(BATCH_ROWS)
        elif head.startswith(_ARROW_FILE):
            reader = pa.ipc.open_file(pa.memory_map(name))
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            batches = pa.ipc.open_stream(pa.memory_map(name))
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from batch.slice(start, BATCH_ROWS).to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{name} is damaged: {error}") from None


def _decompressed(file: BinaryIO, head: bytes) -> BinaryIO:
    if head.startswith(_GZIP):
        return io.BufferedReader(gzip.GzipFile(fileobj=file))  # type: ignore[return-value]
    if head.startswith(_ZSTD):
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(file, "zstd"))  # type: ignore[arg-type, return-value]
    return file


def _lines(file: BinaryIO, name: str, limit: int) -> Iterator[Raw]:
    """Lines without their ending. A compressed file that breaks off gives a last row that says so."""
    number = offset = 0
    while True:
        number += 1
        source = Source(name, number, offset)
        try:
            line = file.readline(limit + 2)  # the ending, "\r\n" at most, is not counted
            if not line:
                return
            offset += len(line)
            ended = line.endswith(b"\n")
            too_long = not ended and len(line) == limit + 2
            while not ended and too_long:
                rest = file.readline(_SKIP_BYTES)
                offset += len(rest)
                ended = rest.endswith(b"\n") or not rest
        except (EOFError, OSError, ValueError) as error:  # of gzip, of pyarrow
            yield Raw(source, None, damage=f"{type(error).__name__}: {error}")
            return
        body = line.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1:
            body = body.removeprefix(_BOM)
        yield Raw(source, None if too_long or len(body) > limit else body)
