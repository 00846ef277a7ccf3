"""The pipeline in one process: planner, target, slot and drafter take turns. The reference for every other way.

    PackStream --Pack--> Lease --target--> slot --Filled--> loop --Freed-->

Packs are filled when the loop asks for them, in `seq` order, through the same slots and records that cross
processes elsewhere, so the weights are those of any other arrangement.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftmill.run.ledger import Ledger
from draftmill.slots.memory import LocalSlots
from draftmill.slots.pool import SlotPool
from draftmill.target.model import NonFiniteFeatures, Target
from draftmill.text.packing import PackStream
from draftmill.train.feed import FilledPack
from draftmill.wire import Dropped, Filled, Lease, Outcome, Pack

NONFINITE_FEATURES = "nonfinite_features"


class InProcessFeed:
    """A `train.feed.Feed` over one target. `end` is the seq after the last pack, None for no end."""

    def __init__(
        self,
        stream: PackStream,
        target: Target,
        pool: SlotPool,
        memory: LocalSlots,
        ledger: Ledger,
        end: int | None,
        report: Callable[..., None],
    ) -> None:
        self._stream, self._target = stream, target
        self._pool, self._memory = pool, memory
        self._ledger, self._end, self._report = ledger, end, report
        self._filtered_through = -1  # newest epoch whose filtered documents are entered

    def next(self) -> FilledPack | None:
        """None after the end, and for a pack that could not be filled: its documents are entered as failed."""
        if self._end is not None and self._stream.position["seq"] >= self._end:
            return None
        pack = next(self._stream)
        self._enter_filtered(pack.epoch)
        slot = self._pool.lease(pack.seq)
        if slot is None:
            raise RuntimeError(f"no free slot for pack {pack.seq}: the loop holds one it should have freed")
        answer = self._fill(pack, Lease(pack.seq, slot))
        if isinstance(answer, Dropped):
            self._pool.drop(slot, pack.seq)
            documents = [span.document for span in pack.documents]
            self._ledger.enter(pack.epoch, documents, Outcome.FAILED, answer.reason)
            self._report("pack_dropped", seq=pack.seq, epoch=pack.epoch, reason=answer.reason, documents=documents)
            return None
        self._pool.fill(slot, pack.seq)
        self._pool.read(slot, pack.seq)
        return FilledPack(pack, slot, self._memory.read(slot, pack.tokens))

    def free(self, filled: FilledPack) -> None:
        self._pool.free(filled.slot, filled.pack.seq)

    def _fill(self, pack: Pack, lease: Lease) -> Filled | Dropped:
        token_ids = torch.from_numpy(pack.token_ids).long()
        try:
            features = self._target.features(token_ids, [span.length for span in pack.documents])
        except NonFiniteFeatures:
            return Dropped(lease.seq, lease.slot, NONFINITE_FEATURES)
        self._memory.write(lease.slot, features)
        return Filled(lease.seq, lease.slot)

    def _enter_filtered(self, epoch: int) -> None:
        """Once per epoch; a resumed run finds them entered already."""
        if epoch <= self._filtered_through:
            return
        self._filtered_through = epoch
        by_reason: dict[str, list[int]] = {}
        for document, reason in self._stream.filtered:
            by_reason.setdefault(reason, []).append(document)
        for why, documents in by_reason.items():
            if not self._ledger.has_ended(epoch, documents[0]):
                self._ledger.enter(epoch, documents, Outcome.FILTERED, why)
