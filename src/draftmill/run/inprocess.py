"""The pipeline in one process: stream, target, slot and drafter take turns. The reference for every other way.

    PackStream --Pack--> Lease --target--> slot --Filled--> loop --Freed-->

Packs are filled when the loop asks for them, in `seq` order, through the same slots and records that cross
processes elsewhere, so the weights are those of any other arrangement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import torch

from draftmill.config.load import ConfigError
from draftmill.run.books import Books
from draftmill.run.decisions import Removal
from draftmill.run.plan import RunPlan
from draftmill.run.reporting import StepReporter
from draftmill.run.target_worker import answer
from draftmill.slots.memory import LocalSlots, SlotLayout
from draftmill.slots.pool import SlotPool
from draftmill.target.loading import resolve_device
from draftmill.target.model import Target
from draftmill.text.packing import PackStream
from draftmill.train.checkpoint import Checkpoint
from draftmill.train.feed import FeedStopped, FilledPack
from draftmill.train.gradients import Alone
from draftmill.train.session import DrafterSession
from draftmill.wire import Lease, Pack, Rejected, without

SLOTS = 1  # packs are filled when asked for: one place is all that one process can use


class InProcessFeed:
    """A `train.feed.Feed` over one target."""

    def __init__(
        self,
        plan: RunPlan,
        stream: PackStream,
        target: Target,
        memory: LocalSlots,
        books: Books,
        stop_reason: Callable[[], str | None],
    ) -> None:
        self._plan, self._stream, self._target, self._books = plan, stream, target, books
        self._pool, self._memory = SlotPool(SLOTS), memory
        self._stop_reason = stop_reason
        self._asked = stream.position["seq"]  # micro-steps begun, those after the data's end included
        self._leases = 0

    def next(self) -> FilledPack | None:
        """None after the end, and for a pack of which nothing could be filled."""
        if self._asked % self._plan.packs_per_step == 0 and (reason := self._stop_reason()):
            raise FeedStopped(reason)
        self._asked += 1
        if self._plan.end is not None and self._stream.position["seq"] >= self._plan.end:
            return None
        pack: Pack | None = next(self._stream)
        while pack is not None:
            slot = self._pool.lease(pack.seq)
            if slot is None:
                raise RuntimeError(f"no free slot for pack {pack.seq}: the loop holds one it should have freed")
            self._leases += 1
            said = answer(Lease(self._leases, 0, slot, pack, False), self._target, self._memory)
            if not isinstance(said, Rejected):
                self._pool.fill(slot, pack.seq)
                self._pool.read(slot, pack.seq)
                self._books.delivered(pack)
                return FilledPack(pack, slot, self._memory.read(slot, pack.tokens))
            self._pool.drop(slot, pack.seq)
            removal = Removal(pack.seq, pack.epoch, said.documents, said.reason)
            self._books.removed(removal)
            self._books.report("documents_failed", **asdict(removal))
            pack = without(pack, said.documents)
        return None

    def free(self, filled: FilledPack) -> None:
        self._pool.free(filled.slot, filled.pack.seq)


def run_in_process(
    plan: RunPlan, books: Books, restored: Checkpoint | None, stop_reason: Callable[[], str | None]
) -> str:
    """Returns why training ended."""
    config, spec = plan.config, plan.spec
    if config.pipeline.drafters != 1:
        raise ConfigError(
            f"pipeline.drafters is {config.pipeline.drafters}, but pipeline.mode is inprocess, which has one: "
            "set pipeline.mode=processes"
        )
    torch.set_num_threads(plan.threads)
    target = Target.load(config.target.path, config.target.dtype, config.target.device, spec.target_layer_ids)
    device = resolve_device(config.run.device)
    session = DrafterSession(config, spec, target.vocabulary().to(device), device, restored)
    stream = plan.stream(restored.state["position"] if restored else None)
    reporter = StepReporter(config.run.log_every, books.receive)

    def save(step: int) -> None:
        reporter.flush()
        session.write(step)
        books.seal(step, stream)

    memory = LocalSlots(SlotLayout(SLOTS, config.data.pack_tokens, spec.feature_size, config.target.dtype), device)
    feed = InProcessFeed(plan, stream, target, memory, books, stop_reason)
    return session.train(plan.steps, feed, Alone(), reporter, save)
