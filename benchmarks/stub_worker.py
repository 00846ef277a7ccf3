"""A worker that only takes as long as it is told: everything of the pipeline is real but the models.

    python stub_worker.py PACE ROLE INDEX FD RUN_DIR OPTIONS

PACE: JSON of `Pace`. A target answers a lease after its service time; a drafter keeps a pack for its reading time and
meets the other drafters after every step, as training does.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from draftmill.run.channel import Channel
from draftmill.wire import (
    CheckpointWritten,
    Deliver,
    Filled,
    Finished,
    Freed,
    Lease,
    MetricRow,
    Phase,
    Record,
    SlotsOffered,
    StepDone,
    Stop,
)

START_SECONDS = 4.0  # drafters offer their slots so late that every target is ready by then


@dataclass(frozen=True)
class Pace:
    """Seconds that packs take. Known in advance: functions of target and pack alone."""

    usual: float
    burst: float = 0.0  # of slow packs
    burst_share: float = 0.0
    slow_target: int = -1  # takes ten times as long
    read: float = 0.0

    def service(self, target: int, seq: int) -> float:
        draw = random.Random(seq)
        seconds = self.burst if draw.random() < self.burst_share else self.usual * draw.uniform(0.5, 1.5)
        return seconds * (10 if target == self.slow_target else 1)


def run_target(channel: Channel, index: int, pace: Pace) -> None:
    channel.send(Phase("loading"))
    channel.send(Phase("ready"))
    while True:
        record: Record = channel.receive()
        if isinstance(record, Lease):
            time.sleep(pace.service(index, record.pack.seq))
            channel.send(Filled(record.lease))
        elif isinstance(record, Stop):
            return


def run_drafter(channel: Channel, rank: int, pace: Pace, run_dir: Path, options: dict) -> None:
    import torch

    from draftmill.slots.memory import SharedSlots, SlotLayout
    from draftmill.train.checkpoint import write_tensors
    from draftmill.train.exchange import Gloo
    from draftmill.train.gradients import Alone

    torch.set_num_threads(1)
    started = time.monotonic()
    channel.send(Phase("loading"))
    memory = SharedSlots.create(SlotLayout.from_dict(options["layout"]))
    world = options["world"]
    channel.send(Phase("meeting the other drafters"))
    exchange = Gloo(rank, world, Path(options["rendezvous"]), timedelta(seconds=60)) if world > 1 else Alone()
    channel.send(Phase("ready"))
    time.sleep(max(0.0, START_SECONDS - (time.monotonic() - started)))
    channel.send(SlotsOffered(options["generation"], options["layout"]), fds=(memory.fd,))
    for step in range(1, options["steps"] + 1):
        record = channel.receive()
        assert isinstance(record, Deliver) and record.pack is not None and record.slot is not None
        time.sleep(pace.read)
        channel.send(Freed(record.pack.seq, record.slot))
        exchange.sum(torch.zeros(1))
        if rank == 0:
            channel.send(StepDone(step, True, True))
            channel.send(MetricRow(step, {"loss": 0.0, "accuracy": 0.0, "expected_tau": 1.0}))
    if rank == 0:
        (run_dir / "last-freed").write_text(str(time.time()))
        write_tensors(run_dir / "checkpoints", options["steps"], {"w": torch.zeros(1)}, {"m": torch.zeros(1)})
        channel.send(CheckpointWritten(options["steps"]))
    channel.send(Finished(options["steps"], "finished", ""))


def main() -> None:
    pace, role, index, descriptor, run_dir, options = sys.argv[1:]
    channel = Channel(socket.socket(fileno=int(descriptor)))
    if role == "target":
        run_target(channel, int(index), Pace(**json.loads(pace)))
    else:
        run_drafter(channel, int(index), Pace(**json.loads(pace)), Path(run_dir), json.loads(options))
    os._exit(0)


if __name__ == "__main__":
    main()
