"""What happened in each optimizer step, settled: metrics, ledger entries, console. The only reader of device sums.

Steps are kept as device tensors and read together, at a metric row or a checkpoint, so that the loop never
waits for the device in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from draftmill.drafter.objective import LossSums
from draftmill.observe.console import Progress
from draftmill.observe.metrics import MetricsLog
from draftmill.run.ledger import Ledger
from draftmill.train.loop import StepRecord
from draftmill.wire import Outcome

NONFINITE_STEP = "nonfinite_step"


class Recorder:
    """Owns the steps that happened since the last settlement."""

    def __init__(
        self,
        ledger: Ledger,
        metrics: MetricsLog,
        progress: Progress,
        log_every: int,
        report: Callable[..., None],
    ) -> None:
        self._ledger, self._metrics, self._progress = ledger, metrics, progress
        self._log_every, self._report = log_every, report
        self._pending: list[StepRecord] = []
        self._interval: list[StepRecord] = []  # settled steps of the current metric row
        self._row_started = time.monotonic()
        self._tokens = 0

    def __call__(self, record: StepRecord) -> None:
        self._pending.append(record)
        self._tokens += sum(pack.tokens for pack in record.packs)
        if record.step % self._log_every == 0:
            self.flush()

    def flush(self) -> None:
        """Settle every step so far and write its metric row. Must run before a checkpoint is taken: then no row
        spans a checkpoint, and a resumed run writes the same rows as a straight one.
        """
        self._settle()
        if self._interval:
            self._write_row()

    def _settle(self) -> None:
        """Read the pending steps' verdicts and enter their documents."""
        for record in self._pending:
            applied, finite = bool(record.update.applied), bool(record.update.finite)
            outcome, reason = (Outcome.TRAINED, "") if finite else (Outcome.FAILED, NONFINITE_STEP)
            for pack in record.packs:
                self._ledger.enter(pack.epoch, (span.document for span in pack.documents), outcome, reason)
            if not applied:
                self._report("update_skipped", step=record.step, reason="no_weight" if finite else NONFINITE_STEP)
        self._interval += self._pending
        self._pending = []

    def _write_row(self) -> None:
        steps, self._interval = self._interval, []
        sums = LossSums.zero(len(steps[0].sums.counted), steps[0].sums.numerator.device)
        for record in steps:
            if bool(record.update.finite):
                sums = sums.plus(record.sums)
        packs = [pack for record in steps for pack in record.packs]
        now = time.monotonic()
        seconds, self._row_started = now - self._row_started, now
        tokens, anchors = sum(p.tokens for p in packs), sum(p.anchors for p in packs)
        values = summarise(sums)
        self._metrics.row(
            steps[-1].step,
            **values,
            lr=steps[-1].lr,
            gradient_norm=float(steps[-1].update.gradient_norm),
            steps=len(steps),
            skipped=sum(not bool(record.update.applied) for record in steps),
            epoch=packs[-1].epoch if packs else None,
            packs=len(packs),
            tokens=tokens,
            anchors=anchors,
            anchors_per_token=anchors / tokens if tokens else None,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
        )
        shown = {"loss": values["loss"], "accuracy": values["accuracy"], "teacher_forced_tau": values["expected_tau"]}
        self._progress.update(steps[-1].step, tokens=self._tokens, **shown)


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


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
