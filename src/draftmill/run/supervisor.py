"""The supervisor: parent of all workers. It plans, leases, watches and keeps the books; it never touches a device.

    waits for       unblocked by
    records         workers: phases, slots, fills, steps, checkpoints
    deaths          the kernel: a closed socket, an ended process
    deadlines       itself: start-up phases, overdue leases, hung workers, stops

A target's death takes its lease back and nothing else. A drafter's death takes all drafters back to the newest
checkpoint, while targets stay loaded. Whatever ends the run, every worker is gone before `run` returns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from draftmill.observe.metrics import RollingLog
from draftmill.run.actions import Assign, Deliver, Removed
from draftmill.run.books import Books
from draftmill.run.decisions import Decisions, Removal
from draftmill.run.failure import RunFailed
from draftmill.run.feeder import Feeder
from draftmill.run.fleet import Fleet
from draftmill.run.ledger import Ledger
from draftmill.run.plan import RunPlan
from draftmill.run.planner import SPARE, Planner
from draftmill.run.process import COMMAND, WorkerProcess
from draftmill.slots.memory import SlotLayout
from draftmill.train.checkpoint import Checkpoint, complete_checkpoints, load_checkpoint, remove_unfinished
from draftmill.wire import (
    CheckpointWritten,
    CloseSlots,
    DocumentDone,
    Failed,
    Filled,
    Finished,
    Freed,
    MetricRow,
    OpenSlots,
    Pack,
    Phase,
    Record,
    Rejected,
    SlotsClosed,
    SlotsOffered,
    StepDone,
    Stop,
)
from draftmill.wire import Deliver as DeliverRecord

TICK_SECONDS = 0.2  # how late a silent deadline may be noticed
LEASE_LOG_BYTES = 16 << 20  # twice this is kept: the newest 250,000 leases or so

FromTarget = Filled | Rejected | DocumentDone | SlotsClosed
FromDrafter = Freed | StepDone | MetricRow | CheckpointWritten | Finished
FROM_TARGETS = (Filled, Rejected, DocumentDone, SlotsClosed)
FROM_DRAFTERS = (Freed, StepDone, MetricRow, CheckpointWritten, Finished)


class Supervisor:
    """One run's share in this process. `command` starts a worker."""

    def __init__(
        self,
        plan: RunPlan,
        books: Books,
        restored: Checkpoint | None,
        stop_reason: Callable[[], str | None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.plan, self.books, self.stop_reason = plan, books, stop_reason
        self.pipeline = plan.config.pipeline
        self.decisions = Decisions(plan.config.run.dir / "decisions.jsonl")
        self.leases = RollingLog(plan.config.run.dir / "leases.jsonl", LEASE_LOG_BYTES)
        self.fleet = Fleet(plan.config, books.report, command)
        self.layout = SlotLayout(
            self.pipeline.slots + SPARE, plan.config.data.pack_tokens, plan.spec.feature_size, plan.config.target.dtype
        )
        self.generation = 0  # of the drafters: how often they were started
        self.memories: dict[int, int] = {}  # drafter -> file descriptor of its slots
        self.finished: dict[int, Finished] = {}  # by drafter
        self.stale: dict[int, int] = {}  # target -> lease it works on for drafters that are gone
        self.deaths: dict[str, int] = {}  # worker -> how often it died
        self.been_ready: set[int] = set()  # targets that were ready once
        self.drafter_deaths = 0
        self.clock = time.time() - time.monotonic()  # from this process's clock to the world's
        self.stopping: str | None = None  # why, once a stop is decided
        self.stop_step = plan.steps
        self.told: set[int] = set()  # drafters that know of the stop
        self._plan_from(restored)

    def run(self) -> str:
        """Returns why training ended. Raises RunFailed, or OSError when a checkpoint cannot be written."""
        try:
            self._start_drafters()
            for index in range(self.pipeline.targets):
                self.fleet.add("target", index, self._target_options())
            while len(self.finished) < self.pipeline.drafters:
                self._turn()
            return self._agreed_end()
        finally:
            self.feeder.close()
            self.fleet.end(self.pipeline.stop_seconds)
            self._close_memories()
            self._remove_rendezvous()
            remove_unfinished(self.books.folder.checkpoints)  # of a drafter that was told to leave after an error
            self.leases.close()

    def _agreed_end(self) -> str:
        """All drafters must have ended alike, with the same weights bit for bit."""
        ends = {(end.step, end.reason, end.digest) for end in self.finished.values()}
        if len(ends) > 1:
            raise RunFailed(f"the drafters ended differently: {sorted(ends)}; this is a fault in the exchange")
        return next(iter(ends))[1]

    # One turn of the loop

    def _turn(self) -> None:
        now = time.monotonic()
        deadline = self.planner.next_deadline(now)
        wait = TICK_SECONDS if deadline is None else max(0.0, min(TICK_SECONDS, deadline - now))
        for worker, record, descriptors in self.fleet.receive(wait):
            self._handle(worker, record, descriptors)
        self._bury(self.fleet.collect_dead())
        self.fleet.start_due()
        self._watch()
        if self.stopping is None and (reason := self.stop_reason()):
            self._begin_stop(reason)
        self._act()

    def _act(self) -> None:
        if len(self.memories) < self.pipeline.drafters:
            return  # no target runs before its drafter's slots exist
        for action in self.planner.actions(time.monotonic()):
            if isinstance(action, Removed):
                removal = Removal(action.seq, action.epoch, action.documents, action.reason)
                self.decisions.make(removal)
                self.books.removed(removal)
                self.books.report("documents_failed", **asdict(removal))
            elif isinstance(action, Assign):
                self.fleet.send("target", action.target, action.lease)
            else:
                self._deliver(action)
        self._tell_stop()

    def _deliver(self, action: Deliver) -> None:
        if action.seq >= self.stop_step * self.plan.packs_per_step:
            return  # filled ahead of a stop; a later start plans it again
        if action.pack is not None:
            self.books.delivered(action.pack)
            self.outstanding[action.drafter] += 1
        self.delivered[action.drafter] += 1
        self.moved = dict.fromkeys(self.delivered, time.monotonic())  # one may have waited for another's pack
        self.fleet.send("drafter", action.drafter, DeliverRecord(action.slot or 0, action.pack))

    # Records

    def _handle(self, worker: WorkerProcess, record: Record, descriptors: Sequence[int]) -> None:
        if isinstance(record, Phase):
            self._phase(worker, record.name)
        elif isinstance(record, Failed):
            worker.failure = record.error
        elif isinstance(record, SlotsOffered) and worker.role == "drafter" and len(descriptors) == 1:
            self._offered(worker.index, descriptors[0])
        elif worker.role == "target" and isinstance(record, FROM_TARGETS):
            self._from_target(worker.index, record, time.monotonic())
        elif worker.role == "drafter" and isinstance(record, FROM_DRAFTERS):
            self._from_drafter(worker.index, record)
        else:
            self.fleet.expel(worker, f"sent {type(record).__name__} with {len(descriptors)} descriptors")

    def _phase(self, worker: WorkerProcess, phase: str) -> None:
        worker.enter(phase)
        self.books.report("phase", worker=worker.name, pid=worker.pid, phase=phase)
        if worker.role == "target" and worker.ready:
            for drafter, descriptor in self.memories.items():
                self._open_slots(worker.index, drafter, descriptor)
            self.been_ready.add(worker.index)
            self.planner.target_ready(worker.index)

    def _from_target(self, target: int, record: FromTarget, now: float) -> None:
        if isinstance(record, SlotsClosed):
            return
        if isinstance(record, DocumentDone):
            self.planner.document_done(target, record.lease, record.index)
            return
        self._log_lease(target, record, now)
        if isinstance(record, Filled):
            self.planner.filled(target, record.lease, now)
        else:
            self.planner.rejected(target, record.lease, record.documents, record.reason, now)
        if self.stale.get(target) == record.lease:
            del self.stale[target]  # work for the drafters before the restart is put away
            self.planner.target_ready(target)

    def _log_lease(self, target: int, answer: Filled | Rejected, now: float) -> None:
        work = self.planner.lease_of(target)
        if work is not None and work[0].lease == answer.lease:
            times = {"leased": round(work[1] + self.clock, 4), "answered": round(now + self.clock, 4)}
            outcome = "filled" if isinstance(answer, Filled) else answer.reason
            self.leases.write(
                {"lease": answer.lease, "seq": work[0].pack.seq, "target": target, **times, "outcome": outcome}
            )

    def _from_drafter(self, drafter: int, record: FromDrafter) -> None:
        self.moved[drafter] = time.monotonic()
        if isinstance(record, Freed):
            self.planner.freed(drafter, record.seq, record.slot)
            self.outstanding[drafter] -= 1
        elif isinstance(record, StepDone | MetricRow):
            self.books.receive(record)
        elif isinstance(record, CheckpointWritten):
            self.books.seal(record.step, self.stream)
        else:
            self.finished[drafter] = record
            self.books.report("drafter_finished", drafter=drafter, step=record.step, digest=record.digest)

    def _offered(self, drafter: int, descriptor: int) -> None:
        self.memories[drafter] = descriptor
        for target in self.fleet.ready("target"):
            self._open_slots(target, drafter, descriptor)

    def _open_slots(self, target: int, drafter: int, descriptor: int) -> None:
        self.fleet.send("target", target, OpenSlots(drafter, self.generation, self.layout.to_dict()), fds=(descriptor,))

    # Plans

    def _plan_from(self, checkpoint: Checkpoint | None, first_lease: int = 0) -> None:
        """Stream and planner at the checkpoint's position, with every earlier decision made again."""
        self.stream = self.plan.stream(checkpoint.state["position"] if checkpoint else None)
        for epoch, documents in self.stream.growth:  # a checkpoint may be older than the growth
            self.books.ledger.set_documents(epoch, documents)
        self.step = checkpoint.step if checkpoint else 0
        self.checkpoint = checkpoint
        accumulation = self.plan.config.train.accumulation
        self.delivered = dict.fromkeys(range(self.pipeline.drafters), self.step * accumulation)  # micro-steps
        self.outstanding = dict.fromkeys(range(self.pipeline.drafters), 0)  # packs not yet freed
        self.moved = dict.fromkeys(range(self.pipeline.drafters), time.monotonic())  # when each last got on, or could
        first_seq = self.step * self.plan.packs_per_step
        for decision in self.decisions.since(first_seq):
            self.books.removed(decision)
        self.feeder = Feeder(self._packs(first_seq), self.pipeline.drafters * self.pipeline.slots)
        self.planner = Planner(
            self.feeder,
            self.pipeline.drafters,
            self.pipeline.slots,
            removed=self.decisions.removed(first_seq),
            first_lease=first_lease,
        )

    def _packs(self, seq: int) -> Iterator[Pack]:
        """Packs to the end of the run; after the data's end, empty ones that fill up the last step."""
        for number in range(seq, self.plan.steps * self.plan.packs_per_step):
            if self.plan.end is not None and number >= self.plan.end:
                yield Pack(number, self.stream.position["epoch"], (), np.zeros(0, np.int32), np.zeros(0, np.bool_))
            else:
                yield next(self.stream)

    def _start_drafters(self) -> None:
        self._remove_rendezvous()  # of drafters that were killed, or of a supervisor
        rendezvous = self.plan.config.run.dir / f"rendezvous-{self.generation}"
        for rank in range(self.pipeline.drafters):
            options = {
                "spec": self.plan.spec.to_dict(),
                "steps": self.plan.steps,
                "layout": self.layout.to_dict(),
                "generation": self.generation,
                "checkpoint": str(self.books.folder.checkpoints / f"step-{self.step}") if self.checkpoint else None,
                "world": self.pipeline.drafters,
                "rendezvous": str(rendezvous),
                "timeout": self.pipeline.start_timeout_seconds + self.pipeline.step_timeout_seconds,
                "threads": self.plan.threads,
            }
            self.fleet.add("drafter", rank, options)

    def _remove_rendezvous(self) -> None:
        for file in self.plan.config.run.dir.glob("rendezvous-*"):
            file.unlink(missing_ok=True)

    def _target_options(self) -> dict[str, Any]:
        return {"layer_ids": self.plan.spec.target_layer_ids, "threads": self.plan.threads}

    # Deaths

    def _bury(self, dead: Sequence[WorkerProcess]) -> None:
        for worker in dead:
            self.books.report("died", worker=worker.name, pid=worker.pid, how=worker.end())
            if worker.role == "target":
                self._target_died(worker)
        drafters = [worker for worker in dead if worker.role == "drafter" and worker.index not in self.finished]
        if drafters:  # one death: where a drafter ends, the others lose the exchange
            self._drafter_died(next((worker for worker in drafters if worker.failure), drafters[0]))

    def _target_died(self, worker: WorkerProcess) -> None:
        self.stale.pop(worker.index, None)
        self.planner.target_gone(worker.index)
        if worker.failure and worker.index not in self.been_ready:  # loading failed, and would again
            raise RunFailed(worker.end())
        deaths = self.deaths[worker.name] = self.deaths.get(worker.name, 0) + 1
        if deaths <= self.pipeline.target_restarts:
            options = self._target_options()
            self.fleet.add("target", worker.index, options, delay=min(30.0, 0.5 * 2 ** (deaths - 1)))
        elif not self.fleet.workers("target") and not self.fleet.planned("target"):
            raise RunFailed(f"no target is left; the last one: {worker.end()}")
        else:
            self.books.report("retired", worker=worker.name, deaths=deaths)

    def _drafter_died(self, worker: WorkerProcess) -> None:
        """All drafters start anew from the newest checkpoint; targets stay loaded."""
        self.drafter_deaths += 1
        if worker.failure:  # its own error would only come again
            raise RunFailed(worker.end())
        if self.drafter_deaths > self.pipeline.drafter_restarts:
            raise RunFailed(f"drafters died {self.drafter_deaths} times; the last one: {worker.end()}")
        self.fleet.kill("drafter")
        self.fleet.forget_planned("drafter")
        self.feeder.close()
        self._close_memories()
        self.finished.clear()
        for target in self.fleet.ready("target"):
            for drafter in range(self.pipeline.drafters):
                self.fleet.send("target", target, CloseSlots(drafter, self.generation))
            if (work := self.planner.lease_of(target)) is not None:
                self.stale[target] = work[0].lease
        self.generation += 1
        self.told.clear()
        checkpoints = self.books.folder.checkpoints
        remove_unfinished(checkpoints)
        complete, _ = complete_checkpoints(checkpoints)
        checkpoint = load_checkpoint(complete[-1]) if complete else None
        ledger = (
            Ledger.restore(checkpoint.state["ledger"], checkpoint.ledger)
            if checkpoint
            else Ledger(len(self.plan.dataset))
        )
        self.books.rewind(ledger, checkpoint.step if checkpoint else 0)
        self._plan_from(checkpoint, self.planner.next_lease)
        for target in self.fleet.ready("target"):
            if target not in self.stale:
                self.planner.target_ready(target)
        self.books.report("drafters_restart", step=self.step, generation=self.generation)
        self._start_drafters()

    # Watching and stopping

    def _watch(self) -> None:
        self.fleet.watch_phases()
        now = time.monotonic()
        for worker in self.fleet.workers("target"):
            work = self.planner.lease_of(worker.index)
            if work is not None and now - work[1] > self.pipeline.lease_timeout_seconds:
                worker.failure = f"hung for {now - work[1]:.0f} s at pack {work[0].pack.seq}"
                self.fleet.condemn(worker)
        for worker in self.fleet.workers("drafter"):
            waited = now - self.moved[worker.index]
            if worker.ready and waited > self.pipeline.step_timeout_seconds and self._owes(worker.index):
                self.fleet.condemn(worker)

    def _owes(self, drafter: int) -> bool:
        """It is not waiting for a pack, its own or another drafter's: nothing but itself can get it on."""
        accumulation = self.plan.config.train.accumulation
        least = min(self.delivered.values())
        if self.outstanding[drafter] == 0:
            return least == self.stop_step * accumulation and drafter not in self.finished
        freed = self.delivered[drafter] - self.outstanding[drafter]
        return least >= freed // accumulation * accumulation  # every step before its present one is complete

    def _begin_stop(self, reason: str) -> None:
        """The optimizer step that any drafter has begun is finished by all of them."""
        accumulation = self.plan.config.train.accumulation
        self.stopping = reason
        self.stop_step = max(-(-delivered // accumulation) for delivered in self.delivered.values())
        self.books.report("stopping", reason=reason, after_step=self.stop_step)

    def _tell_stop(self) -> None:
        if self.stopping is None:
            return
        last = self.stop_step * self.plan.config.train.accumulation
        for drafter, delivered in self.delivered.items():
            if delivered == last and drafter not in self.told:
                self.told.add(drafter)
                self.fleet.send("drafter", drafter, Stop(self.stopping))

    def _close_memories(self) -> None:
        for descriptor in self.memories.values():
            os.close(descriptor)
        self.memories.clear()
