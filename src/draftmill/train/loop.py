"""The training loop of one drafter. It owns `step`; everything it depends on is handed to it.

    feed.next --FilledPack--> micro-steps --gradients, sums--> exchange --> optimizer --Update--> record, save

All drafters of a run take the same steps. Inside a micro-step the host never waits for the device; sums are
read when something is recorded or saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftmill.config.schema import TrainConfig
from draftmill.drafter.objective import LossSums
from draftmill.train.feed import Feed, FeedStopped
from draftmill.train.gradients import Exchange, FlatGradients
from draftmill.train.optimizer import Optimizer, Update
from draftmill.train.schedule import learning_rate
from draftmill.wire import Pack

FINISHED = "finished"


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """An optimizer step as it happened; the tensors are still on the device."""

    step: int  # steps done after this one
    lr: float
    sums: LossSums  # over all drafters and micro-steps
    update: Update


@dataclass(slots=True)
class TrainRun:
    """A drafter in training. `step` optimizer steps of `steps` are done."""

    config: TrainConfig
    steps: int
    device: torch.device
    feed: Feed
    micro_step: Callable[[Pack, Tensor], LossSums]
    gradients: FlatGradients
    exchange: Exchange
    optimizer: Optimizer
    record: Callable[[StepRecord], None]
    save: Callable[[int], None]  # a checkpoint of the state after that many steps
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
        try:
            sums = accumulate(run)
        except FeedStopped as stop:
            run.save_once()
            return stop.reason
        lr = learning_rate(run.step, run.steps, run.config)
        sums = run.gradients.exchange(sums, run.exchange)  # waits for the other drafters
        update = run.optimizer.update(sums.numerator, sums.denominator, lr)
        run.step += 1
        run.record(StepRecord(run.step, lr, sums, update))
        if run.step % run.checkpoint_every == 0:
            run.save_once()
    run.save_once()
    return FINISHED


def accumulate(run: TrainRun) -> LossSums:
    """The micro-steps of one optimizer step: this drafter's gradients are in the masters, its sums on the device."""
    total = LossSums.zero(run.slots, run.device)
    for _ in range(run.config.accumulation):
        filled = run.feed.next()  # waits for a target
        if filled is None:
            continue
        if filled.pack.anchors:
            total = total.plus(run.micro_step(filled.pack, filled.features))
        run.feed.free(filled)
    return total
