"""The ledger: how every document of every epoch ended. Each entry is made once, and the sums must agree.

An epoch is open while documents of it are without an end. Open epochs keep one byte per document; a closed
epoch is checked and reduced to its counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftmill.wire import Outcome

_OPEN = 0  # no end yet


class Ledger:
    """Owns the ends of all documents. Raises RuntimeError on a second end or on sums that disagree."""

    def __init__(self, documents: int) -> None:
        self._documents = [(0, documents)]  # ascending (epoch, documents from that epoch on)
        self._codes: list[str] = []  # code i + 1 is "outcome" or "outcome: reason"
        self._epochs: dict[int, np.ndarray] = {}  # uint8 [documents] per open epoch
        self._closed: dict[int, dict[str, int]] = {}

    def documents(self, epoch: int) -> int:
        """How many must end in `epoch`."""
        return next(documents for first, documents in reversed(self._documents) if first <= epoch)

    def set_documents(self, epoch: int, documents: int) -> None:
        """From `epoch` on there are `documents`: the dataset has grown."""
        self._documents = sorted({**dict(self._documents), epoch: documents}.items())
        self.check()

    def enter(self, epoch: int, documents: Iterable[int], outcome: Outcome, reason: str = "") -> None:
        """End `documents` (dataset rows) of `epoch`."""
        rows = np.fromiter(documents, dtype=np.int64)
        if len(rows) == 0:
            return
        if epoch in self._closed:
            raise RuntimeError(f"epoch {epoch} is closed, document {rows[0]} cannot end in it again")
        fates = self._epochs.setdefault(epoch, np.zeros(self.documents(epoch), dtype=np.uint8))
        if len(np.unique(rows)) < len(rows) or (fates[rows] != _OPEN).any():
            twice = rows[fates[rows] != _OPEN]
            first = twice[0] if len(twice) else rows[0]
            raise RuntimeError(f"document {first} would end twice in epoch {epoch}")
        fates[rows] = self._code(f"{outcome}: {reason}" if reason else str(outcome))
        if (fates != _OPEN).all():
            self._closed[epoch] = self._count(fates)
            del self._epochs[epoch]

    def has_ended(self, epoch: int, document: int) -> bool:
        return epoch in self._closed or (epoch in self._epochs and bool(self._epochs[epoch][document] != _OPEN))

    def counts(self, epoch: int) -> dict[str, int]:
        """Documents of `epoch` by end; "open" counts those without one."""
        if epoch in self._closed:
            return dict(self._closed[epoch])
        return self._count(self._epochs.get(epoch, np.zeros(self.documents(epoch), dtype=np.uint8)))

    def totals(self) -> dict[str, int]:
        """Ends over all epochs, without "open"."""
        totals: dict[str, int] = {}
        for epoch in (*self._closed, *self._epochs):
            for end, count in self.counts(epoch).items():
                if end != "open":
                    totals[end] = totals.get(end, 0) + count
        return totals

    def check(self) -> None:
        """Every epoch's counts add up to the number of documents."""
        for epoch in (*self._closed, *self._epochs):
            counts = self.counts(epoch)
            if sum(counts.values()) != self.documents(epoch):
                raise RuntimeError(f"epoch {epoch}: {counts} do not add up to {self.documents(epoch)} documents")

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """JSON-able part and tensors for a checkpoint."""
        self.check()
        closed = {str(epoch): counts for epoch, counts in self._closed.items()}
        tensors = {f"epoch.{epoch}": torch.from_numpy(fates.copy()) for epoch, fates in self._epochs.items()}
        return {"documents": self._documents, "codes": list(self._codes), "closed": closed}, tensors

    @classmethod
    def restore(cls, state: dict[str, Any], tensors: dict[str, Tensor]) -> Ledger:
        ledger = cls(0)
        ledger._documents = [(epoch, documents) for epoch, documents in state["documents"]]
        ledger._codes = list(state["codes"])
        ledger._closed = {int(epoch): counts for epoch, counts in state["closed"].items()}
        ledger._epochs = {int(name.removeprefix("epoch.")): fates.numpy().copy() for name, fates in tensors.items()}
        ledger.check()
        return ledger

    def _code(self, end: str) -> int:
        if end not in self._codes:
            if len(self._codes) == 255:
                raise RuntimeError(f"more than 255 kinds of ends, the last {end!r}: reasons must be few and fixed")
            self._codes.append(end)
        return self._codes.index(end) + 1

    def _count(self, fates: np.ndarray) -> dict[str, int]:
        numbers = np.bincount(fates, minlength=len(self._codes) + 1)
        return {end: int(n) for end, n in zip(["open", *self._codes], numbers, strict=True) if n}
