"""Decisions that depend on faults: which documents were taken out of which pack. Append-only, synced, made again.

A run that goes back to a checkpoint plans the same packs again; with these it leaves out the same documents, so that
what is trained does not depend on when a fault happened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Removal:
    """`documents` (dataset rows) of pack `seq` fail."""

    seq: int
    epoch: int
    documents: tuple[int, ...]
    reason: str


class Decisions:
    """Owns `decisions.jsonl` of a run folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made: list[Removal] = []
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            if line.endswith("\n"):  # not cut short by a kill
                values = json.loads(line)
                self._made.append(Removal(**{**values, "documents": tuple(values["documents"])}))

    def make(self, removal: Removal) -> None:
        """On disk before anything that follows from it."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(removal)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._made.append(removal)

    def since(self, seq: int) -> list[Removal]:
        """Those about pack `seq` and later ones."""
        return [removal for removal in self._made if removal.seq >= seq]

    def removed(self, seq: int) -> dict[int, Collection[int]]:
        """The same as documents by seq."""
        gone: dict[int, set[int]] = {}
        for removal in self.since(seq):
            gone.setdefault(removal.seq, set()).update(removal.documents)
        return dict(gone)
