"""A prepared dataset on disk: Arrow files of token rows, and a manifest that is written last.

    <folder>/rows-00000.arrow   token_ids list<int32>, spans list<int32> (start, end, ...), source int32, line int64
    <folder>/manifest.json      what the rows are, for which target, and the size of every file

Files are written into `<folder>.partial` and renamed once complete, so a folder is whole or absent.
Reading maps the files into memory: its memory use does not depend on their size.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TextIO

import numpy as np
import pyarrow as pa

from draftmill.text.render import TokenRow
from draftmill.text.rows import RowCounts, count_rows

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"

_SCHEMA = pa.schema(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("spans", pa.list_(pa.int32())),
        ("source", pa.int32()),
        ("line", pa.int64()),
    ]
)
_BATCH_ROWS = 4096
_BATCH_TOKENS = 4 * 2**20


class DatasetWriter:
    """Collects rows into `<folder>.partial`; `commit` writes the manifest and renames. Use as a context manager."""

    def __init__(self, folder: str | Path, *, overwrite: bool = False) -> None:
        self.folder = Path(folder)
        self.partial = _partial(self.folder)
        if self.folder.exists() and not overwrite:
            raise ValueError(f"{self.folder} exists already: choose another folder, or overwrite it")
        if self.folder.exists() and not (self.folder / MANIFEST).exists():
            raise ValueError(f"{self.folder} is not a prepared dataset, so it is not overwritten: remove it yourself")
        self.rows = self.tokens = self.supervised_tokens = 0
        self._digest = hashlib.sha256()
        self._lock = self._take_partial()
        self._file = self.partial / "rows-00000.arrow"
        self._sink = pa.OSFile(str(self._file), "wb")
        self._arrow = pa.ipc.new_file(self._sink, _SCHEMA)
        self._clear_batch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.partial.exists() and not self._sink.closed:  # not committed
            self._close_file()
            shutil.rmtree(self.partial)
        self._lock.close()

    def add(self, row: TokenRow, source: int, line: int) -> None:
        spans = np.asarray(row.spans, dtype=np.int32).reshape(-1)
        self._digest.update(np.array([len(row.token_ids), len(spans)], dtype=np.int64).tobytes())
        self._digest.update(row.token_ids.tobytes())
        self._digest.update(spans.tobytes())
        self.rows += 1
        self.tokens += len(row.token_ids)
        self.supervised_tokens += int((spans[1::2] - spans[0::2]).sum())
        for column, value in zip(self._batch, (row.token_ids, spans, source, line), strict=True):
            column.append(value)
        self._batch_tokens += len(row.token_ids)
        if len(self._batch[0]) >= _BATCH_ROWS or self._batch_tokens >= _BATCH_TOKENS:
            self._flush()

    def commit(self, manifest: Mapping[str, Any]) -> None:
        """Completes `manifest` with what the writer knows and makes the dataset appear under its name."""
        self._flush()
        self._close_file()
        _sync(self._file)
        whole = {
            **manifest,
            "schema_version": SCHEMA_VERSION,
            "rows": self.rows,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "fingerprint": self._digest.hexdigest(),
            "files": {self._file.name: self._file.stat().st_size},
        }
        path = self.partial / MANIFEST
        path.write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        _sync(path)
        (self.partial / "lock").unlink()
        _sync(self.partial)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.partial.rename(self.folder)
        _sync(self.folder.parent)

    def _take_partial(self) -> TextIO:
        """Starts from an empty partial folder; a folder that another process is filling stays alone."""
        self.partial.mkdir(parents=True, exist_ok=True)
        lock = open(self.partial / "lock", "w")  # noqa: SIM115 - held until the dataset is complete
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ValueError(
                f"another process is writing {self.folder}: wait for it, or choose another folder"
            ) from None
        for leftover in self.partial.iterdir():
            if leftover.name != "lock":
                leftover.unlink()
        return lock

    def _clear_batch(self) -> None:
        self._batch: tuple[list[Any], ...] = ([], [], [], [])
        self._batch_tokens = 0

    def _flush(self) -> None:
        if not self._batch[0]:
            return
        ids, spans, sources, lines = self._batch
        columns = [_list_array(ids), _list_array(spans), pa.array(sources, pa.int32()), pa.array(lines, pa.int64())]
        self._arrow.write_batch(pa.record_batch(columns, schema=_SCHEMA))
        self._clear_batch()

    def _close_file(self) -> None:
        self._arrow.close()
        self._sink.close()


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
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            batches += [reader.get_batch(i) for i in range(reader.num_record_batches)]
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
        if _partial(folder).exists():
            raise ValueError(
                f"{folder} is not complete: {_partial(folder)} is half-written, by a `draftmill prepare` that was "
                "interrupted or still runs; wait for it or run it again"
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


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def _list_array(rows: list[np.ndarray]) -> pa.ListArray:
    offsets = np.cumsum([0] + [len(row) for row in rows]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows)))


def _list_views(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets [n + 1] and values, both without a copy."""
    return column.offsets.to_numpy(), column.values.to_numpy()


def _list_item(views: tuple[np.ndarray, np.ndarray], at: int) -> np.ndarray:
    offsets, values = views
    return values[offsets[at] : offsets[at + 1]]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
