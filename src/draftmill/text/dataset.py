"""A prepared dataset on disk, read at random: Arrow streams of token rows, and a manifest.

    <folder>/rows-00000.arrow   token_ids list<int32>, spans list<int32> (start, end, ...), source int32, line int64
    <folder>/rows-00001.arrow   rows added later (`draftmill prepare --append`)
    <folder>/manifest.json      what the rows are, for which target, the size of every file, and earlier sizes

A folder with a manifest is whole; `dataset_writer` makes it. Reading maps the files into memory: beyond a few bytes
per row (lengths) its memory use does not depend on their size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from draftmill.text.block import RowBlock
from draftmill.text.rows import RowCounts, count_rows

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
SCHEMA = pa.schema(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("spans", pa.list_(pa.int32())),
        ("source", pa.int32()),
        ("line", pa.int64()),
    ]
)


class PreparedDataset:
    """Read access by row number. Holds the manifest; rows come from the mapped files."""

    def __init__(self, folder: Path, manifest: dict[str, Any], batches: list[pa.RecordBatch]) -> None:
        self.folder = folder
        self.manifest = manifest
        self._ids = [_list_views(batch.column("token_ids")) for batch in batches]
        self._spans = [_list_views(batch.column("spans")) for batch in batches]
        self._batches = batches
        self._first_row = np.cumsum([0] + [batch.num_rows for batch in batches])
        empty = [np.zeros(0, dtype=np.int32)]
        self.lengths: np.ndarray = np.concatenate(empty + [np.diff(offsets) for offsets, _ in self._ids])  # int32 [n]

    @classmethod
    def open(cls, folder: str | Path) -> PreparedDataset:
        folder = Path(folder)
        manifest = _read_manifest(folder)
        batches: list[pa.RecordBatch] = []
        for name, size in manifest["files"].items():
            path = folder / name
            actual = path.stat().st_size if path.exists() else None
            if actual != size:
                state = "is missing" if actual is None else f"has {actual} bytes"
                raise ValueError(f"{path} {state}, its manifest says {size} bytes: run `draftmill prepare` again")
            batches += pa.ipc.open_stream(pa.memory_map(str(path)))
        dataset = cls(folder, manifest, batches)
        if len(dataset) != manifest["rows"]:
            raise ValueError(
                f"{folder} holds {len(dataset)} rows, its manifest says {manifest['rows']}: prepare it again"
            )
        return dataset

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def fingerprint(self) -> str:
        """Hash of all token ids and spans in row order, whatever the batches and files."""
        return str(self.manifest["fingerprint"])

    @property
    def earlier(self) -> dict[int, str]:
        """Sizes in rows that this dataset had before it grew, and its fingerprint at each."""
        return {state["rows"]: state["fingerprint"] for state in self.manifest["earlier"]}

    def blocks(self) -> Iterator[RowBlock]:
        """All rows in order, some thousand at a time."""
        for name in self.manifest["files"]:
            yield from read_blocks(self.folder / name)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """token_ids int32 [T] (a read-only view of the file) and supervised bool [T]."""
        batch, at = self._locate(index)
        token_ids = _list_item(self._ids[batch], at)
        supervised = np.zeros(len(token_ids), dtype=np.bool_)
        for start, end in self.spans(index):
            supervised[start:end] = True
        return token_ids, supervised

    def spans(self, index: int) -> np.ndarray:
        """int32 [m, 2]: supervised tokens as [start, end)."""
        batch, at = self._locate(index)
        return _list_item(self._spans[batch], at).reshape(-1, 2)

    def source(self, index: int) -> tuple[str, int]:
        """File and 1-based line that the row was made from."""
        batch, at = self._locate(index)
        file = self._batches[batch].column("source")[at].as_py()
        return self.manifest["sources"][file]["path"], self._batches[batch].column("line")[at].as_py()

    def counts(self, limit: int) -> RowCounts:
        """Lengths, supervised and eligible positions of every row cut to `limit` tokens."""
        parts = [
            count_rows(np.diff(ids[0]), spans[1][spans[0][0] : spans[0][-1]], spans[0] - spans[0][0], limit)
            for ids, spans in zip(self._ids, self._spans, strict=True)
        ]
        empty = RowCounts(*(np.zeros(0, dtype=np.int64) for _ in RowCounts._fields))
        return RowCounts(*(np.concatenate(columns) for columns in zip(empty, *parts, strict=True)))

    def occurrences(self, token_id: int) -> int:
        """How often a token stands in the rows."""
        return sum(int((values[offsets[0] : offsets[-1]] == token_id).sum()) for offsets, values in self._ids)

    def check_target(self, identity: Mapping[str, str | None]) -> None:
        """`identity`: any of config_hash, tokenizer_hash, chat_template_hash of the target at training time."""
        prepared = self.manifest["target"]
        for name, actual in identity.items():
            expected = prepared.get(name)
            if actual is not None and expected is not None and actual != expected:
                raise ValueError(
                    f"{self.folder} was prepared for a target with {name} {expected}, but target.path has {actual}: "
                    "its token ids are not those of this target; run `draftmill prepare` with this target"
                )

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        batch = int(np.searchsorted(self._first_row, index, side="right")) - 1
        return batch, index - int(self._first_row[batch])


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.exists():
        if partial_folder(folder).exists():
            raise ValueError(
                f"{folder} is not complete: {partial_folder(folder)} is half-written, by a `draftmill prepare` that "
                "was interrupted or still runs; wait for it, or give the same command again to go on"
            )
        what = (
            "has no manifest.json: it is half-written or no prepared dataset" if folder.exists() else "does not exist"
        )
        raise ValueError(f"{folder} {what}; run `draftmill prepare`")
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    version = manifest.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{folder} has dataset schema {version}, this version reads {SCHEMA_VERSION}: prepare it again"
        )
    return manifest


def partial_folder(folder: Path) -> Path:
    """Where a dataset is written until it is complete."""
    return folder.with_name(folder.name + ".partial")


def read_blocks(path: Path) -> Iterator[RowBlock]:
    """The rows of one file from its start, one batch in memory at a time: mapped pages would add up."""
    with pa.OSFile(str(path)) as file:
        yield from map(_block, pa.ipc.open_stream(file))


def _block(batch: pa.RecordBatch) -> RowBlock:
    (id_offsets, ids), (span_offsets, spans) = map(_list_views, (batch.column("token_ids"), batch.column("spans")))
    return RowBlock(
        ids[id_offsets[0] : id_offsets[-1]],
        np.diff(id_offsets),
        spans[span_offsets[0] : span_offsets[-1]],
        np.diff(span_offsets),
        batch.column("source").to_numpy(),
        batch.column("line").to_numpy(),
    )


def _list_views(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets [n + 1] and values, both without a copy."""
    return column.offsets.to_numpy(), column.values.to_numpy()


def _list_item(views: tuple[np.ndarray, np.ndarray], at: int) -> np.ndarray:
    offsets, values = views
    return values[offsets[at] : offsets[at + 1]]
