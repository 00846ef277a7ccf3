"""Writes a prepared dataset, or adds rows to one; goes on after a kill where the last checkpoint was.

    <folder>.partial/rows-00000.arrow   record batches, appended and synced
    <folder>.partial/journal.json       how many bytes of them count, and the caller's state there; replaced as a whole
    <folder>.partial/lock               held by the one process that writes

Always: the folder itself appears, or changes, only when all is complete; bytes after the journal's are cut off before
writing goes on, so no row is lost or doubled; and the files are a function of the blocks alone, not of interruptions.
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

from draftmill.text.block import RowBlock
from draftmill.text.dataset import MANIFEST, SCHEMA, SCHEMA_VERSION, PreparedDataset, block_of, partial_folder

_JOURNAL = "journal.json"
_BATCH_BLOCKS = 16
_BATCH_TOKENS = 4 * 2**20


class DatasetWriter:
    """Collects rows; `commit` makes them appear under the folder's name. Use as a context manager.

    An early end keeps what the last checkpoint holds for a writer that is made with equal `begun_with`: that one finds
    the checkpoint's state in `state`. `discard` keeps nothing.
    """

    def __init__(
        self,
        folder: str | Path,
        begun_with: Mapping[str, Any] | None = None,
        *,
        overwrite: bool = False,
        base: PreparedDataset | None = None,
    ) -> None:
        """`base`: the dataset in `folder`, to which rows are added."""
        self.folder = Path(folder)
        self.partial = partial_folder(self.folder)
        self.base = base
        self._check_folder(overwrite)
        self._begun_with = dict(begun_with or {})
        if self.base:
            self._begun_with["dataset"] = self.base.fingerprint
        self.rows = self.tokens = self.supervised_tokens = 0  # of the whole dataset, its earlier rows included
        self.occurrences = np.zeros(0, dtype=np.int64)  # of each token id
        self.state: dict[str, Any] | None = None  # the caller's, at the checkpoint that is continued
        self.afresh: str | None = None  # why an interrupted writer's rows are not continued
        self._digest = hashlib.sha256()
        self._pending: list[RowBlock] = []
        self._pending_tokens = 0
        for block in self.base.blocks() if self.base else ():
            self._enter(block)
        self._lock = self._take_partial()
        self._file = self.partial / f"rows-{len(self.base.manifest['files']) if self.base else 0:05d}.arrow"
        self._sink = self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sink.close()
        if self.partial.exists() and not (self.partial / _JOURNAL).exists():
            shutil.rmtree(self.partial)
        self._lock.close()

    def discard(self) -> None:
        """Nothing that was written is worth keeping."""
        (self.partial / _JOURNAL).unlink(missing_ok=True)

    @property
    def due(self) -> bool:
        """Time for a checkpoint: a function of the blocks added, so that batches do not depend on anything else."""
        return len(self._pending) >= _BATCH_BLOCKS or self._pending_tokens >= _BATCH_TOKENS

    def add(self, block: RowBlock) -> None:
        self._pending.append(block)
        self._pending_tokens += len(block.token_ids)

    def checkpoint(self, state: Mapping[str, Any]) -> None:
        """All rows added so far, and `state` (JSON values), survive a kill from here on."""
        self._flush()
        journal = {"begun_with": self._begun_with, "bytes": self._sink.tell(), "state": dict(state)}
        _replace(self.partial / _JOURNAL, json.dumps(journal, ensure_ascii=False))

    def commit(self, manifest: Mapping[str, Any]) -> None:
        """Completes `manifest` with what the writer knows and makes the rows appear under the folder's name."""
        self._flush()
        self._sink.write(b"\xff\xff\xff\xff\0\0\0\0")  # end of an Arrow stream
        self._sink.close()
        _sync(self._file)
        before = self.base.manifest if self.base else {"files": {}, "earlier": []}
        earlier = [*before["earlier"]]
        if self.base:
            earlier.append({"rows": len(self.base), "fingerprint": self.base.fingerprint})
        whole = {
            **manifest,
            "schema_version": SCHEMA_VERSION,
            "rows": self.rows,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "fingerprint": self._digest.hexdigest(),
            "files": {**before["files"], self._file.name: self._file.stat().st_size},
            "earlier": earlier,
        }
        text = json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
        if self.base:
            self._file.rename(self.folder / self._file.name)
            _replace(self.folder / MANIFEST, text)
            shutil.rmtree(self.partial)
            return
        _replace(self.partial / MANIFEST, text)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        for name in (_JOURNAL, "lock"):
            (self.partial / name).unlink(missing_ok=True)
        self.partial.rename(self.folder)
        _sync(self.folder.parent)

    def _check_folder(self, overwrite: bool) -> None:
        if self.base and overwrite:
            raise ValueError("append keeps the dataset's rows and overwrite replaces them: choose one")
        if self.base or not self.folder.exists():
            return
        if not overwrite:
            raise ValueError(f"{self.folder} exists already: choose another folder, append to it, or overwrite it")
        if not (self.folder / MANIFEST).exists():
            raise ValueError(f"{self.folder} is not a prepared dataset, so it is not overwritten: remove it yourself")

    def _take_partial(self) -> TextIO:
        """A folder that another process is filling stays alone."""
        self.partial.mkdir(parents=True, exist_ok=True)
        lock = open(self.partial / "lock", "w")  # noqa: SIM115 - held until the dataset is complete
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ValueError(
                f"another process is writing {self.folder}: wait for it, or choose another folder"
            ) from None
        return lock

    def _open(self) -> Any:
        """The rows file, at the end of what counts."""
        journal = self._journal()
        for leftover in self.partial.iterdir():
            if leftover.name != "lock" and not (journal and leftover in (self._file, self.partial / _JOURNAL)):
                leftover.unlink()
        if journal is None:
            sink = open(self._file, "wb")  # noqa: SIM115 - closed by commit or __exit__
            sink.write(SCHEMA.serialize())
            return sink
        sink = open(self._file, "r+b")  # noqa: SIM115
        sink.truncate(journal["bytes"])
        with pa.memory_map(str(self._file)) as mapped:
            for batch in pa.ipc.open_stream(mapped):
                self._enter(block_of(batch))
        sink.seek(journal["bytes"])
        self.state = journal["state"]
        return sink

    def _journal(self) -> dict[str, Any] | None:
        """Of an interrupted writer, if its work can be continued."""
        path = self.partial / _JOURNAL
        if not path.exists():
            return None
        journal: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        before, now = journal["begun_with"], json.loads(json.dumps(self._begun_with))
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if changed:
            self.afresh = "; ".join(f"{name} was {before.get(name)}, is {now.get(name)}" for name in changed)
            return None
        actual = self._file.stat().st_size if self._file.exists() else 0
        if actual < journal["bytes"]:
            self.afresh = f"{self._file.name} has {actual} bytes, its journal says {journal['bytes']}"
            return None
        return journal

    def _flush(self) -> None:
        if self._pending:
            block = RowBlock.join(self._pending)
            self._pending, self._pending_tokens = [], 0
            if len(block):
                self._enter(block)
                self._sink.write(_batch(block).serialize())
        self._sink.flush()
        os.fsync(self._sink.fileno())

    def _enter(self, block: RowBlock) -> None:
        for piece in block.digests():
            self._digest.update(piece)
        self.rows += len(block)
        self.tokens += len(block.token_ids)
        self.supervised_tokens += block.supervised_tokens
        counted = np.bincount(block.token_ids, minlength=len(self.occurrences))
        counted[: len(self.occurrences)] += self.occurrences
        self.occurrences = counted


def _batch(block: RowBlock) -> pa.RecordBatch:
    columns = [
        _list_array(block.token_ids, block.lengths),
        _list_array(block.spans, block.span_lengths),
        pa.array(block.sources, pa.int32()),
        pa.array(block.lines, pa.int64()),
    ]
    return pa.record_batch(columns, schema=SCHEMA)


def _list_array(values: np.ndarray, lengths: np.ndarray) -> pa.ListArray:
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _replace(path: Path, text: str) -> None:
    """The file has the old content or the new one, never a part."""
    aside = path.with_name(path.name + ".new")
    aside.write_text(text, encoding="utf-8")
    _sync(aside)
    aside.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
