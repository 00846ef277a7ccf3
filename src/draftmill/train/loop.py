"""The training loop of one drafter. It owns `step`; everything it depends on is handed to it.

    feed.next --FilledPack--> micro-steps --sums, gradients--> optimizer --Update--> record, save

Inside a micro-step the host never waits for the device. Sums are read when something is recorded or saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftmill.config.schema import TrainConfig
from draftmill.drafter.objective import LossSums
from draftmill.drafter.pack import DevicePack, to_device
from draftmill.train.feed import Feed
from draftmill.train.optimizer import Optimizer, Update
from draftmill.train.schedule import learning_rate
from draftmill.wire import Pack

FINISHED = "finished"


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """An optimizer step as it happened; the tensors are still on the device."""

    step: int  # steps done after this one
    lr: float
    packs: tuple[Pack, ...]
    sums: LossSums
    update: Update


@dataclass(slots=True)
class TrainRun:
    """A drafter in training. `step` optimizer steps of `steps` are done."""

    config: TrainConfig
    steps: int
    device: torch.device
    feed: Feed
    micro_step: Callable[[DevicePack, Tensor], LossSums]
    optimizer: Optimizer
    record: Callable[[StepRecord], None]
    save: Callable[[int], None]  # a checkpoint of the state after that many steps
    stop_reason: Callable[[], str | None]  # asked between optimizer steps
    checkpoint_every: int
    slots: int  # B - 1 predicting slots
    step: int = 0
    saved: int = -1  # the newest step with a checkpoint of this process

    def save_once(self) -> None:
        if self.saved != self.step:
            self.save(self.step)
            self.saved = self.step


def train(run: TrainRun) -> str:
    """Train until `run.steps` or a stop. Returns FINISHED or the reason to stop; a checkpoint exists either way."""
    while run.step < run.steps:
        if reason := run.stop_reason():
            run.save_once()
            return reason
        lr = learning_rate(run.step, run.steps, run.config)
        packs, sums = accumulate(run)
        update = run.optimizer.update(sums.numerator, sums.denominator, lr)
        run.step += 1
        run.record(StepRecord(run.step, lr, packs, sums, update))
        if run.step % run.checkpoint_every == 0:
            run.save_once()
    run.save_once()
    return FINISHED


def accumulate(run: TrainRun) -> tuple[tuple[Pack, ...], LossSums]:
    """The micro-steps of one optimizer step: gradients are in the masters, sums on the device."""
    packs: list[Pack] = []
    total = LossSums.zero(run.slots, run.device)
    for _ in range(run.config.accumulation):
        filled = run.feed.next()  # waits for a target
        if filled is None:
            continue
        if filled.pack.anchors:
            total = total.plus(run.micro_step(to_device(filled.pack, run.device), filled.features))
        packs.append(filled.pack)
        run.feed.free(filled)
    return tuple(packs), total
