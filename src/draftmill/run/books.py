"""The books of a run: the fate of every document, metric rows, checkpoints made whole. Plain numbers, no device.

Kept by the supervisor, or by the one process of an in-process run. A document ends when its step's verdict arrives,
or when it is taken out of its pack before training. A checkpoint's position, ledger and step always agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftmill.observe.console import Progress
from draftmill.observe.metrics import MetricsLog
from draftmill.run.decisions import Removal
from draftmill.run.failure import RunFailed
from draftmill.run.folder import RunFolder
from draftmill.run.ledger import Ledger
from draftmill.run.plan import RunPlan
from draftmill.text.packing import PackStream
from draftmill.train.checkpoint import seal
from draftmill.wire import MetricRow, Outcome, Pack, StepDone

NONFINITE_STEP = "nonfinite_step"
STEPS_WITHOUT_UPDATE = 50  # in a row: then nothing is learnt any more, and the run ends


@dataclass(slots=True)
class _Row:
    """What a metric row adds to the drafters' own numbers."""

    packs: int = 0
    tokens: int = 0
    anchors: int = 0
    epoch: int | None = None


class Books:
    """Owns the ledger, the steps settled, and packs that were handed out and await their verdict."""

    def __init__(
        self,
        plan: RunPlan,
        folder: RunFolder,
        ledger: Ledger,
        metrics: MetricsLog,
        progress: Progress,
        filtered: Sequence[tuple[int, str]],
        report: Callable[..., None],
        step: int = 0,
    ) -> None:
        self.plan, self.folder, self.ledger = plan, folder, ledger
        self.report = report
        self.step = step  # steps whose documents are settled
        self._metrics, self._progress = metrics, progress
        self._filtered = filtered  # documents in no pack, with the reason
        self._delivered: dict[int, Pack] = {}  # by seq
        self._removed: dict[int, list[Removal]] = {}  # by seq
        self._epoch_opened = -1
        self._without_update = 0
        self._row = _Row()
        self._row_started = time.monotonic()
        self._tokens = 0

    def rewind(self, ledger: Ledger, step: int) -> None:
        """Forget everything after checkpoint `step`: it will happen again."""
        self.ledger, self.step = ledger, step
        self._delivered.clear()
        self._removed.clear()
        self._epoch_opened = -1
        self._row = _Row()
        self._metrics.truncate_after(step)

    def delivered(self, pack: Pack) -> None:
        """`pack` goes to its drafter, which trains on it in step `seq div packs_per_step` + 1."""
        self._delivered[pack.seq] = pack

    def removed(self, removal: Removal) -> None:
        """Documents taken out of their pack before training. They end with the step of their pack, as its others do:
        the ledger never runs ahead of the checkpoint's position.
        """
        self._removed.setdefault(removal.seq, []).append(removal)

    def receive(self, record: StepDone | MetricRow) -> None:
        if isinstance(record, StepDone):
            self._settle(record)
        else:
            self._write(record)

    def seal(self, step: int, stream: PackStream) -> None:
        """Add the books to the tensors of checkpoint `step`. A full disk raises OSError; older ones stay valid."""
        if step != self.step:
            raise RuntimeError(f"checkpoint of step {step}, but the books are at step {self.step}")
        seq = min(step * self.plan.packs_per_step, stream.position["seq"])
        ledger_state, ledger_tensors = self.ledger.state()
        state = {
            "spec": self.plan.spec.to_dict(),
            "position": stream.position_at(seq),
            "ledger": ledger_state,
            "steps": self.plan.steps,
            "provenance": self.plan.provenance,
            "config": self.plan.config.model_dump(mode="json"),
        }
        path = seal(self.folder.checkpoints, step, ledger_tensors, state, self.plan.config.run.keep_checkpoints)
        self.report("checkpoint", step=step, path=path)

    def _settle(self, done: StepDone) -> None:
        outcome, reason = (Outcome.TRAINED, "") if done.finite else (Outcome.FAILED, NONFINITE_STEP)
        per_step = self.plan.packs_per_step
        for seq in range((done.step - 1) * per_step, done.step * per_step):
            for removal in self._removed.pop(seq, ()):
                self._open(removal.epoch)
                self.ledger.enter(removal.epoch, removal.documents, Outcome.FAILED, removal.reason)
            pack = self._delivered.pop(seq, None)  # None: a micro-step of zero weight
            if pack is None:
                continue
            self._open(pack.epoch)
            self.ledger.enter(pack.epoch, (span.document for span in pack.documents), outcome, reason)
            self._row.packs += 1
            self._row.tokens += pack.tokens
            self._row.anchors += pack.anchors
            self._row.epoch = pack.epoch
        self.step = done.step
        self._without_update = 0 if done.applied else self._without_update + 1
        if not done.applied:
            why = "no_weight" if done.finite else NONFINITE_STEP
            self.report("update_skipped", step=done.step, reason=why)
            if self._without_update in (STEPS_WITHOUT_UPDATE, self.plan.steps):
                raise RunFailed(
                    f"no weight has moved in the last {self._without_update} steps, the last one for {why}: "
                    f"see events.jsonl in {self.folder.path}"
                )

    def _open(self, epoch: int) -> None:
        """Documents that are in no pack end with the first pack of each epoch."""
        if epoch <= self._epoch_opened:
            return
        self._epoch_opened = epoch
        by_reason: dict[str, list[int]] = {}
        for document, reason in self._filtered:
            if document >= self.ledger.documents(epoch):  # the dataset has grown, and it takes part later
                continue
            by_reason.setdefault(reason, []).append(document)
        for why, documents in by_reason.items():
            if not self.ledger.has_ended(epoch, documents[0]):  # a resumed run has entered them already
                self.ledger.enter(epoch, documents, Outcome.FILTERED, why)

    def _write(self, row: MetricRow) -> None:
        extra, self._row = self._row, _Row()
        now = time.monotonic()
        seconds, self._row_started = now - self._row_started, now
        self._tokens += extra.tokens
        self._metrics.row(
            row.step,
            **row.values,
            epoch=extra.epoch,
            packs=extra.packs,
            tokens=extra.tokens,
            anchors=extra.anchors,
            anchors_per_token=extra.anchors / extra.tokens if extra.tokens else None,
            seconds=seconds,
            tokens_per_second=extra.tokens / seconds,
        )
        shown = {name: row.values[name] for name in ("loss", "accuracy")}
        self._progress.update(row.step, tokens=self._tokens, **shown, teacher_forced_tau=row.values["expected_tau"])
