"""From device sums to plain numbers: the only reader of what optimizer steps leave on the device.

Steps are kept as tensors and read together, at a metric row or a checkpoint, so that the loop never waits for the
device in between. What is read goes on as records, to wherever the books are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftmill.drafter.objective import LossSums
from draftmill.train.loop import StepRecord
from draftmill.wire import MetricRow, StepDone


class StepReporter:
    """Owns the steps that happened since the last flush."""

    def __init__(self, log_every: int, send: Callable[[StepDone | MetricRow], None]) -> None:
        self._log_every, self._send = log_every, send
        self._steps: list[StepRecord] = []

    def __call__(self, record: StepRecord) -> None:
        self._steps.append(record)
        if record.step % self._log_every == 0:
            self.flush()

    def flush(self) -> None:
        """Report every step so far. Must run before a checkpoint is taken: then no metric row spans a checkpoint,
        and a resumed run writes the same rows as a straight one.
        """
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        sums = LossSums.zero(len(steps[0].sums.counted), steps[0].sums.numerator.device)
        skipped = 0
        for record in steps:
            applied, finite = bool(record.update.applied), bool(record.update.finite)
            self._send(StepDone(record.step, applied, finite))
            skipped += not applied
            if finite:
                sums = sums.plus(record.sums)
        last = steps[-1]
        values = {
            **summarise(sums),
            "lr": last.lr,
            "gradient_norm": float(last.update.gradient_norm),
            "steps": len(steps),
            "skipped": skipped,
        }
        self._send(MetricRow(last.step, values))


def summarise(sums: LossSums) -> dict[str, Any]:
    """Means of a metric row. `expected_tau`: 1 + hits before the first miss, teacher forced; not real decoding."""
    counted = sums.counted.clamp_min(1)
    blocks = float(sums.counted[0])  # every drawn anchor's first slot counts
    return {
        "loss": float(sums.numerator / sums.denominator) if float(sums.denominator) else float("nan"),
        "cross_entropy": float(sums.cross_entropy.sum() / sums.counted.sum().clamp_min(1)),
        "accuracy": float(sums.hits.sum() / sums.counted.sum().clamp_min(1)),
        "slot_accuracy": [round(value, 6) for value in (sums.hits / counted).tolist()],
        "expected_tau": 1 + float(sums.survived.sum()) / max(blocks, 1.0),
    }
