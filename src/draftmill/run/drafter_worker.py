"""A drafter worker: makes its slots, takes packs in order, trains, and reports. The loop itself is train/loop.py.

Waits for: packs (unblocked by the targets) and, once a step, the other drafters (unblocked by them or their end).
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from draftmill.config.schema import Config
from draftmill.config.spec import DrafterSpec
from draftmill.run.channel import Channel
from draftmill.run.reporting import StepReporter
from draftmill.slots.memory import SharedSlots, SlotLayout
from draftmill.target.loading import resolve_device
from draftmill.target.vocabulary import load_vocabulary
from draftmill.train.checkpoint import load_checkpoint
from draftmill.train.exchange import Gloo
from draftmill.train.feed import FeedStopped, FilledPack
from draftmill.train.gradients import Alone, Exchange
from draftmill.train.session import DrafterSession
from draftmill.wire import CheckpointWritten, Deliver, Finished, Freed, Phase, SlotsOffered, Stop


class ChannelFeed:
    """A `train.feed.Feed` over the supervisor's socket: packs come in order, and a stop only between two steps."""

    def __init__(self, channel: Channel, memory: SharedSlots) -> None:
        self._channel, self._memory = channel, memory

    def next(self) -> FilledPack | None:
        record = self._channel.receive()
        if isinstance(record, Stop):
            raise FeedStopped(record.reason)
        if not isinstance(record, Deliver):
            raise RuntimeError(f"expected a pack or a stop, got {type(record).__name__}")
        if record.pack is None:
            return None
        return FilledPack(record.pack, record.slot, self._memory.read(record.slot, record.pack.tokens))

    def free(self, filled: FilledPack) -> None:
        self._channel.send(Freed(filled.pack.seq, filled.slot))


def run_drafter(rank: int, channel: Channel, config: Config, options: dict[str, Any]) -> None:
    """`options`: spec, steps, layout, generation, checkpoint (folder or None), world, rendezvous, timeout."""
    channel.send(Phase("loading"))
    device = resolve_device(config.run.device)
    memory = SharedSlots.create(SlotLayout.from_dict(options["layout"]))
    channel.send(SlotsOffered(options["generation"], options["layout"]), fds=(memory.fd,))
    session = DrafterSession(
        config,
        DrafterSpec.from_dict(options["spec"]),
        load_vocabulary(config.target.path, config.target.dtype, device),
        device,
        load_checkpoint(Path(options["checkpoint"])) if options["checkpoint"] else None,
        rank,
    )
    channel.send(Phase("meeting the other drafters"))
    exchange: Exchange = Alone()
    if options["world"] > 1:
        exchange = Gloo(rank, options["world"], Path(options["rendezvous"]), timedelta(seconds=options["timeout"]))
    channel.send(Phase("ready"))

    # every drafter has the same bits and the same sums: the first one writes and tells
    reporter = StepReporter(config.run.log_every, channel.send if rank == 0 else _nowhere)

    def save(step: int) -> None:
        if rank == 0:
            reporter.flush()
            session.write(step)
            channel.send(CheckpointWritten(step))

    reason = session.train(options["steps"], ChannelFeed(channel, memory), exchange, reporter, save)
    channel.send(Finished(session.step, reason, session.digest()))


def _nowhere(record: object) -> None:
    """Where the other drafters' reports go."""
