"""A target and a drafter that share slots, each a process of its own, without any model.

    python slot_peers.py (target | drafter) FD [LAYOUT]

The target fills a leased slot with a function of the pack's seq. The drafter reads a delivered slot twice and compares
every element; a Phase tells it how: fast, slow (it takes its time between the two), or careless (it frees before it
reads, as a drafter must not). What it finds wrong it says as Failed.
"""

import json
import socket
import sys
import time

import torch

from draftmill.run.channel import Channel, PeerClosed
from draftmill.slots.memory import SharedSlots, SlotLayout
from draftmill.wire import (
    CloseSlots,
    Deliver,
    Failed,
    Filled,
    Freed,
    Lease,
    OpenSlots,
    Phase,
    SlotsClosed,
    SlotsOffered,
)

SLOW_SECONDS = 0.0005


def features(seq, tokens, layout):
    """Exact in float32, different in each pack, row and column."""
    rows = torch.arange(tokens)[:, None] * layout.feature_size + torch.arange(layout.feature_size)
    return (rows + 1000 * seq).to(layout.torch_dtype)


def run_target(channel):
    memories = {}
    while True:
        record, descriptors = channel.receive_with_fds()
        if isinstance(record, Lease):
            pack = record.pack
            memory = memories[record.drafter]
            memory.write(record.slot, features(pack.seq, pack.tokens, memory.layout))
            channel.send(Filled(record.lease))
        elif isinstance(record, OpenSlots):
            memories[record.drafter] = SharedSlots.attach(SlotLayout.from_dict(record.layout), descriptors[0])
            channel.send(Phase("mapped"))
        elif isinstance(record, CloseSlots):
            memories.pop(record.drafter).close()
            channel.send(SlotsClosed(record.drafter, record.generation))


def run_drafter(channel, layout):
    memory = SharedSlots.create(layout)
    channel.send(SlotsOffered(0, layout.to_dict()), [memory.fd])
    pace = "fast"
    while True:
        record = channel.receive()
        if isinstance(record, Phase):
            pace = record.name
        elif isinstance(record, Deliver):
            freed = Freed(record.pack.seq, record.slot)
            if pace == "careless":
                channel.send(freed)
                time.sleep(4 * SLOW_SECONDS)
            check(channel, memory, record)
            if pace == "slow":
                time.sleep(SLOW_SECONDS)
                check(channel, memory, record)
            if pace != "careless":
                channel.send(freed)


def check(channel, memory, record):
    pack = record.pack
    expected = features(pack.seq, pack.tokens, memory.layout)
    found = memory.read(record.slot, pack.tokens)
    if not torch.equal(found, expected):
        wrong = int((found != expected).sum())
        channel.send(
            Failed(f"pack {pack.seq} in slot {record.slot}: {wrong} of {found.numel()} elements are wrong", "")
        )


def main():
    torch.set_num_threads(1)
    channel = Channel(socket.socket(fileno=int(sys.argv[2])))
    try:
        if sys.argv[1] == "target":
            run_target(channel)
        else:
            run_drafter(channel, SlotLayout.from_dict(json.loads(sys.argv[3])))
    except PeerClosed:
        pass


if __name__ == "__main__":
    main()
