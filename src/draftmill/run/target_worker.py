"""A target worker: leases in, features into slots, answers out. It knows packs and slots, no steps and no drafters.

Waits for a record. Unblocked by: the supervisor, or its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftmill.config.schema import Config
from draftmill.run.channel import Channel
from draftmill.slots.memory import SharedSlots, SlotLayout, SlotMemory
from draftmill.target.model import NonFiniteFeatures, Target
from draftmill.wire import (
    CloseSlots,
    DocumentDone,
    Filled,
    Lease,
    OpenSlots,
    Pack,
    Phase,
    Rejected,
    SlotsClosed,
    Stop,
)

NONFINITE_FEATURES = "nonfinite_features"


def run_target(channel: Channel, config: Config, options: dict[str, Any]) -> None:
    channel.send(Phase("loading"))
    target = Target.load(config.target.path, config.target.dtype, config.target.device, tuple(options["layer_ids"]))
    channel.send(Phase("ready"))
    memories: dict[int, SharedSlots] = {}  # by drafter
    while True:
        record, descriptors = channel.receive_with_fds()
        if isinstance(record, Lease):
            channel.send(answer(record, target, memories[record.drafter], channel.send))
        elif isinstance(record, OpenSlots):
            memories[record.drafter] = SharedSlots.attach(SlotLayout.from_dict(record.layout), descriptors[0])
        elif isinstance(record, CloseSlots):
            memories.pop(record.drafter).close()
            channel.send(SlotsClosed(record.drafter, record.generation))
        elif isinstance(record, Stop):
            return


def answer(
    lease: Lease, target: Target, memory: SlotMemory, done: Callable[[DocumentDone], None] | None = None
) -> Filled | Rejected:
    """Fill the leased slot with all of its pack, or say which documents cannot be. `done`: told of each document."""
    pack = lease.pack
    try:
        features = _one_by_one(lease, target, done) if lease.one_by_one and done else compute(pack, target)
    except NonFiniteFeatures as error:
        guilty = tuple(pack.documents[index].document for index in error.documents)
        return Rejected(lease.lease, guilty, NONFINITE_FEATURES)
    memory.write(lease.slot, features)
    return Filled(lease.lease)


def compute(pack: Pack, target: Target) -> torch.Tensor:
    """Features [T, F] of a whole pack. Raises NonFiniteFeatures."""
    return target.features(torch.from_numpy(pack.token_ids).long(), [span.length for span in pack.documents])


def _one_by_one(lease: Lease, target: Target, done: Callable[[DocumentDone], None]) -> torch.Tensor:
    """Find out whether each document can be computed at all; then the pack as always, so that no bit differs."""
    token_ids = torch.from_numpy(lease.pack.token_ids).long()
    for index, span in enumerate(lease.pack.documents):
        target.features(token_ids[span.start : span.start + span.length], [span.length])
        done(DocumentDone(lease.lease, index))
    return compute(lease.pack, target)
