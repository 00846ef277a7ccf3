"""Logs of a run: one JSON object a line, complete as soon as the call returns.

    metrics.jsonl   a row every few steps
    events.jsonl    what happens seldom: starts, deaths, checkpoints, decisions
    leases.jsonl    who computed which pack, and when: the newest of them

Always valid JSON: a NaN or infinity becomes null, and its key is listed under "nonfinite". A write that fails
(disk full) is reported once and leaves no half line behind; the run goes on, later rows are tried again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, Self

_log = logging.getLogger(__name__)


class JsonLines:
    """An append-only file of JSON objects. Opening it cuts off the half line that a killed writer left."""

    def __init__(self, path: Path | str, on_failure: Callable[[str], None] = _log.warning) -> None:
        self.path = Path(path)
        self._on_failure = on_failure
        self._failed = False
        self._file = self._open()
        self._cut(_complete_size(self.path))

    def write(self, row: dict[str, Any]) -> None:
        line = memoryview(json.dumps(plain_row(row), ensure_ascii=False, allow_nan=False).encode() + b"\n")
        start = None
        try:
            start = os.fstat(self._file.fileno()).st_size
            while line:
                line = line[self._file.write(line) :]
        except (OSError, ValueError) as error:  # ValueError: closed
            self._report(f"{self.path}: rows are being lost: {error}")
            if start is not None:
                self._cut(start)

    def close(self) -> None:
        self._file.close()

    def _open(self) -> FileIO:
        return open(self.path, "ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut(self, size: int) -> None:
        try:
            os.ftruncate(self._file.fileno(), size)
        except OSError as error:
            self._report(f"{self.path}: a broken line cannot be removed: {error}")

    def _report(self, message: str) -> None:
        if not self._failed:
            self._failed = True
            self._on_failure(message)


class MetricsLog(JsonLines):
    """Rows in step order. A resumed run first drops the rows past its checkpoint, so each step is there once."""

    def row(self, step: int, **values: Any) -> None:
        self.write({"step": step, **values})

    def truncate_after(self, step: int) -> None:
        """Drop every row whose step lies past `step`."""
        end = 0
        with open(self.path, "rb") as file:
            for line in file:
                if _step(line) > step:
                    break
                end += len(line)
        self._cut(end)


class EventLog(JsonLines):
    """What happened and when. Never truncated: a resume is an event of its own."""

    def event(self, name: str, **fields: Any) -> None:
        self.write({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "event": name, **fields})


class RollingLog(JsonLines):
    """Keeps the newest rows: a full file becomes `NAME.1.jsonl` in place of the one before."""

    def __init__(self, path: Path | str, file_bytes: int, on_failure: Callable[[str], None] = _log.warning) -> None:
        super().__init__(path, on_failure)
        self._file_bytes = file_bytes

    @property
    def older(self) -> Path:
        return self.path.with_suffix(f".1{self.path.suffix}")

    def write(self, row: dict[str, Any]) -> None:
        super().write(row)
        try:
            if os.fstat(self._file.fileno()).st_size < self._file_bytes:
                return
            os.replace(self.path, self.older)
            full, self._file = self._file, self._open()
            full.close()
        except (OSError, ValueError) as error:
            self._report(f"{self.path}: cannot begin a new file: {error}")


def _step(line: bytes) -> float:
    """Step of a row; a damaged one lies past everything, so that it is dropped with what follows."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def read_rows(path: Path | str) -> Iterator[dict[str, Any]]:
    """The complete rows of a file, which may still be written to."""
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def plain_row(row: dict[str, Any]) -> dict[str, Any]:
    """`row` in JSON's own types, with the keys of non-finite numbers under "nonfinite"."""
    nonfinite: list[str] = []
    plain = {str(key): _plain(value, str(key), nonfinite) for key, value in row.items()}
    return plain | ({"nonfinite": nonfinite} if nonfinite else {})


def _plain(value: Any, key: str, nonfinite: list[str]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        nonfinite.append(key)
        return None
    if isinstance(value, dict):
        return {str(inner): _plain(item, f"{key}.{inner}", nonfinite) for inner, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, f"{key}.{index}", nonfinite) for index, item in enumerate(value)]
    if callable(getattr(value, "tolist", None)):  # numpy and torch
        return _plain(value.tolist(), key, nonfinite)
    return str(value)


def _complete_size(path: Path) -> int:
    """Bytes up to and with the last line break."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            position = file.read(end - start).rfind(b"\n")
            if position >= 0:
                return start + position + 1
            end = start
    return 0
