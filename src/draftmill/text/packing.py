"""Rows -> packs: which documents share a pack, in which order, for ever.

The plan of an epoch is a pure function of (row lengths and supervision, data settings, seed, epoch):
  1. order: documents sorted by a hash of (seed, epoch, document);
  2. windows of `pack_window` documents of that order are packed, largest first, each document into the
     fullest pack with room for its tokens and its anchors; the emptiest pack goes back to the next window;
  3. the packs of a window leave in the order of another hash.
Held always: each document that is not filtered is in exactly one pack of an epoch; a pack's tokens stay
within C and its anchors within ceil(anchor_rate x C); a document's anchors do not depend on its neighbours.
Planning reads lengths only, so resuming reads no earlier row. An epoch keeps the documents it began with: rows that
a dataset has gained since (`draftmill prepare --append`) enter at the next epoch, as planned for the larger dataset.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from draftmill.text.hashing import Purpose, hash32
from draftmill.text.rows import Rows
from draftmill.wire import DocumentSpan, Pack

PLAN_VERSION = 1


class PackSettings(Protocol):
    """The part of `config.schema.DataConfig` that decides the packs."""

    @property
    def pack_tokens(self) -> int: ...
    @property
    def anchor_rate(self) -> float: ...
    @property
    def anchors_per_document(self) -> int: ...
    @property
    def pack_window(self) -> int: ...


class FilterReason(StrEnum):
    """Why a document of the dataset is in no pack. The ledger enters it so in every epoch."""

    NO_ANCHOR = "no_anchor_within_pack_tokens"


@dataclass(frozen=True, slots=True, eq=False)
class EpochPlan:
    """The packs of one epoch: pack p holds documents[starts[p] : starts[p + 1]]."""

    documents: np.ndarray  # int64 [n]
    starts: np.ndarray  # int64 [packs + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def pack(self, index: int) -> np.ndarray:
        return self.documents[self.starts[index] : self.starts[index + 1]]


def anchor_count(rate: float, tokens: np.ndarray | int) -> np.ndarray:
    """ceil(rate x tokens), free of the binary fraction's dust (0.1 x 30 is 3 anchors, not 4)."""
    return np.ceil(np.round(rate * np.asarray(tokens, dtype=np.float64), 9)).astype(np.int64)


class Planner:
    """Plans epochs from counts alone. Pure: equal arguments give equal plans."""

    def __init__(self, rows: Rows, settings: PackSettings, seed: int) -> None:
        self.seed = seed
        self.pack_tokens = settings.pack_tokens
        self.pack_anchors = int(anchor_count(settings.anchor_rate, settings.pack_tokens))
        self.window = settings.pack_window
        counts = rows.counts(settings.pack_tokens)
        wanted = np.minimum(settings.anchors_per_document, anchor_count(settings.anchor_rate, counts.supervised))
        self.lengths = counts.lengths  # int64 [n], after truncation
        self.anchors = np.minimum(wanted, counts.eligible)  # int64 [n]
        self.documents = np.flatnonzero(self.anchors > 0)
        self.filtered = tuple((int(i), FilterReason.NO_ANCHOR) for i in np.flatnonzero(self.anchors == 0))
        if not len(self.documents):
            raise ValueError(
                f"none of the {len(rows)} documents has two supervised tokens in a row within its first "
                f"data.pack_tokens {settings.pack_tokens} tokens: raise data.pack_tokens"
            )
        # A document's size is its larger share of the two budgets: the one that fills a pack first.
        self._size = np.maximum(self.lengths / self.pack_tokens, self.anchors / self.pack_anchors)

    def plan(self, epoch: int, documents: int) -> EpochPlan:
        """The packs of an epoch over the first `documents` rows of the dataset."""
        planned = self.documents[: np.searchsorted(self.documents, documents)]
        key = hash32(Purpose.DOCUMENT_ORDER, self.seed, epoch, planned)
        order = planned[np.argsort(key, kind="stable")]
        packs: list[list[int]] = []
        carried: list[int] = []
        for number, at in enumerate(range(0, len(order), self.window)):
            window = np.concatenate((np.array(carried, dtype=np.int64), order[at : at + self.window]))
            filled, emptiest = self._fill(window)
            carried = filled.pop(emptiest) if at + self.window < len(order) else []
            shuffle = hash32(Purpose.PACK_ORDER, self.seed, epoch, number, np.arange(len(filled)))
            packs += [filled[i] for i in np.argsort(shuffle, kind="stable")]
        starts = np.cumsum([0] + [len(pack) for pack in packs])
        return EpochPlan(np.fromiter((i for pack in packs for i in pack), np.int64, len(order)), starts)

    def _fill(self, window: np.ndarray) -> tuple[list[list[int]], int]:
        """Largest document first, each into the fullest pack that holds it. Also the emptiest pack's index."""
        window = window[np.argsort(-self._size[window], kind="stable")]
        lengths, anchors = self.lengths[window], self.anchors[window]
        # From here on no document is smaller than these: a pack with less room left is closed.
        least_tokens = np.minimum.accumulate(lengths[::-1])[::-1].tolist()
        least_anchors = np.minimum.accumulate(anchors[::-1])[::-1].tolist()
        packs: list[list[int]] = []
        room: list[tuple[int, int, int]] = []  # open packs, ascending: free tokens, free anchors, pack
        closed: list[tuple[int, int]] = []  # free tokens, pack
        for i, (document, length, count) in enumerate(
            zip(window.tolist(), lengths.tolist(), anchors.tolist(), strict=True)
        ):
            at = bisect_left(room, (length, count, -1))
            while at < len(room) and room[at][1] < count:
                if room[at][1] < least_anchors[i]:
                    closed.append((room[at][0], room[at][2]))
                    del room[at]
                else:
                    at += 1
            if at < len(room):
                tokens, free, pack = room.pop(at)
            else:
                tokens, free, pack = self.pack_tokens, self.pack_anchors, len(packs)
                packs.append([])
            packs[pack].append(document)
            tokens, free = tokens - length, free - count
            if tokens < least_tokens[i] or free < least_anchors[i]:
                closed.append((tokens, pack))
            else:
                insort(room, (tokens, free, pack))
        return packs, max(closed + [(tokens, pack) for tokens, _, pack in room])[1]


class PackStream:
    """Packs in `seq` order, across epochs, without end. `position` is all that a restart needs."""

    def __init__(
        self,
        rows: Rows,
        settings: PackSettings,
        seed: int,
        position: Mapping[str, Any] | None = None,
    ) -> None:
        self.rows = rows
        self.planner = Planner(rows, settings, seed)
        self.settings: dict[str, Any] = {
            "plan_version": PLAN_VERSION,
            "dataset": rows.fingerprint,
            "documents": len(rows),
            "train.seed": seed,
            "data.pack_tokens": settings.pack_tokens,
            "data.anchor_rate": settings.anchor_rate,
            "data.anchors_per_document": settings.anchors_per_document,
            "data.pack_window": settings.pack_window,
        }
        if position is None:
            position = {"epoch": 0, "seq": 0, "epoch_first_seq": 0, "settings": self.settings}
        earlier = position["settings"]
        self.growth: list[list[int]] = position.get("growth", [[0, earlier["documents"]]])
        """Ascending [epoch, documents]: from that epoch on, the first so many rows of the dataset take part."""
        if rows.earlier.get(earlier["documents"]) == earlier["dataset"] != rows.fingerprint:
            following = position["epoch"] + 1
            self.growth = [entry for entry in self.growth if entry[0] < following] + [[following, len(rows)]]
            earlier = {**earlier, "dataset": rows.fingerprint, "documents": len(rows)}
        self._refuse_changes(earlier)
        self._epoch: int = position["epoch"]
        self._seq: int = position["seq"]
        self._first_seq: dict[int, int] = {self._epoch: position["epoch_first_seq"]}  # of each epoch since the start
        self._plans: dict[int, EpochPlan] = {}  # the current epoch's alone
        self._packs_in_epoch: dict[int, int] = {}

    @property
    def filtered(self) -> tuple[tuple[int, FilterReason], ...]:
        """Documents that are in no pack, in every epoch that they take part in."""
        return self.planner.filtered

    @property
    def position(self) -> dict[str, Any]:
        """Where the next pack starts, as plain JSON values."""
        return self.position_at(self._seq)

    def position_at(self, seq: int) -> dict[str, Any]:
        """The position whose next pack is `seq`, for any seq since this stream's start: what is not yet trained."""
        starts = self._first_seq  # one reading of it: another thread may be taking packs
        if not min(starts.values()) <= seq <= self._seq:
            raise ValueError(f"pack {seq} is not among those this stream has given out (next: {self._seq})")
        epoch = max(epoch for epoch, first in starts.items() if first <= seq)
        return {
            "epoch": epoch,
            "seq": seq,
            "epoch_first_seq": starts[epoch],
            "growth": self.growth,
            "settings": dict(self.settings),
        }

    def documents_in(self, epoch: int) -> int:
        """The first so many rows of the dataset take part in `epoch`."""
        return next(documents for first, documents in reversed(self.growth) if first <= epoch)

    def packs_in_epoch(self, epoch: int) -> int:
        if epoch not in self._packs_in_epoch:
            plan = self._plans.get(epoch) or self.planner.plan(epoch, self.documents_in(epoch))
            self._packs_in_epoch[epoch] = len(plan)
        return self._packs_in_epoch[epoch]

    def end_of(self, epochs: int) -> int:
        """The seq after the last pack of the first `epochs` epochs, none of them before this stream's start."""
        start = min(self._first_seq)
        return self._first_seq[start] + sum(self.packs_in_epoch(epoch) for epoch in range(start, epochs))

    def padding_share(self, epoch: int) -> float:
        """Share of the packs' token places of an epoch that hold no token."""
        taking_part = self.planner.documents[self.planner.documents < self.documents_in(epoch)]
        tokens = int(self.planner.lengths[taking_part].sum())
        return 1 - tokens / (self.packs_in_epoch(epoch) * self.planner.pack_tokens)

    def __iter__(self) -> Iterator[Pack]:
        return self

    def __next__(self) -> Pack:
        plan = self._plan(self._epoch)
        index = self._seq - self._first_seq[self._epoch]
        if index == len(plan):
            self._epoch += 1
            self._first_seq = {**self._first_seq, self._epoch: self._seq}
            plan, index = self._plan(self._epoch), 0
        pack = self._build(plan.pack(index))
        self._seq += 1
        return pack

    def _plan(self, epoch: int) -> EpochPlan:
        if epoch not in self._plans:
            self._plans = {epoch: self.planner.plan(epoch, self.documents_in(epoch))}
        return self._plans[epoch]

    def _build(self, documents: np.ndarray) -> Pack:
        spans: list[DocumentSpan] = []
        token_ids: list[np.ndarray] = []
        supervised: list[np.ndarray] = []
        start = 0
        for document in documents.tolist():
            length = int(self.planner.lengths[document])
            ids, mask = self.rows.row(document)
            token_ids.append(ids[:length])
            supervised.append(mask[:length])
            spans.append(DocumentSpan(document, start, length, int(self.planner.anchors[document])))
            start += length
        return Pack(self._seq, self._epoch, tuple(spans), np.concatenate(token_ids), np.concatenate(supervised))

    def _refuse_changes(self, earlier: Mapping[str, Any]) -> None:
        for name in {**earlier, **self.settings}:
            if earlier.get(name) != self.settings.get(name):
                raise ValueError(
                    f"{name} is {self.settings.get(name)}, but the run being resumed has {earlier.get(name)}: this "
                    "changes which documents share a pack; restore the setting, or start a new run"
                )
