"""`run_training`: a run from its settings to its end, started or resumed, in one process or in many.

The order matters: settings and dataset are refused before the run folder is touched, and a checkpoint is restored
before the first pack is planned.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from draftmill.config.load import ConfigError
from draftmill.config.schema import Config
from draftmill.config.spec import DrafterSpec
from draftmill.observe.console import Progress
from draftmill.observe.metrics import EventLog, MetricsLog
from draftmill.run.books import Books
from draftmill.run.folder import RunFolder
from draftmill.run.inprocess import run_in_process
from draftmill.run.ledger import Ledger
from draftmill.run.plan import RunPlan, plan_run
from draftmill.run.process import COMMAND
from draftmill.run.supervisor import Supervisor
from draftmill.train.checkpoint import Checkpoint, complete_checkpoints, load_checkpoint, remove_unfinished
from draftmill.train.loop import FINISHED

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainResult:
    reason: str  # FINISHED, or why it stopped before the end
    step: int
    steps: int
    checkpoint: Path  # the newest
    ended: dict[str, int]  # documents over all epochs, by how they ended


def run_training(config: Config, resume: bool = False, command: Sequence[str] = COMMAND) -> TrainResult:
    """Train the drafter that `config` describes, in `config.run.dir`. `command` starts a worker.

    Raises ConfigError for settings that cannot be used, ValueError for a dataset or target that does not fit.
    """
    plan = plan_run(config)
    with (
        RunFolder(config, resume) as folder,
        EventLog(folder.path / "events.jsonl") as events,
        MetricsLog(folder.path / "metrics.jsonl") as metrics,
        stop_signals() as signalled,
    ):
        remove_unfinished(folder.checkpoints)
        restored = newest_checkpoint(folder, events.event) if resume else None
        if restored:
            check_same_drafter(plan.spec, restored)
            check_same_target(plan, restored)
            warn_of_other_numerics(folder, plan, events.event)
            plan = plan.resumed(restored.state["position"])
        step = restored.step if restored else 0
        ledger = Ledger.restore(restored.state["ledger"], restored.ledger) if restored else Ledger(len(plan.dataset))
        stream = plan.stream(restored.state["position"] if restored else None)
        for epoch, documents in stream.growth:
            ledger.set_documents(epoch, documents)
        metrics.truncate_after(step)
        folder.write_manifest(**manifest_facts(plan))
        events.event("resumed" if restored else "started", step=step, steps=plan.steps)
        with Progress(plan.steps, step) as progress:
            books = Books(plan, folder, ledger, metrics, progress, stream.filtered, events.event, step)
            stop = stop_rule(signalled, config.train.time_limit_minutes)
            if config.pipeline.mode == "inprocess":
                reason = run_in_process(plan, books, restored, stop)
            else:
                reason = Supervisor(plan, books, restored, stop, command).run()
        events.event("finished" if reason == FINISHED else "stopped", step=books.step, reason=reason)
        newest = complete_checkpoints(folder.checkpoints)[0][-1]
        return TrainResult(reason, books.step, plan.steps, newest, books.ledger.totals())


def newest_checkpoint(folder: RunFolder, report: Callable[..., None]) -> Checkpoint | None:
    """The newest complete checkpoint, saying which folders were passed over; None where there is none yet."""
    complete, skipped = complete_checkpoints(folder.checkpoints)
    for path, reason in skipped.items():
        log.warning("%s is skipped: %s", path, reason)
        report("checkpoint_skipped", path=path, reason=reason)
    if not complete:
        log.warning("%s has no complete checkpoint: the run starts from its beginning", folder.path)
        return None
    return load_checkpoint(complete[-1])


def check_same_drafter(spec: DrafterSpec, checkpoint: Checkpoint) -> None:
    stored = DrafterSpec.from_dict(checkpoint.state["spec"])
    if stored != spec:
        changed = {k: v for k, v in spec.to_dict().items() if stored.to_dict()[k] != v}
        raise ConfigError(
            f"the checkpoint's drafter differs from this one in {changed}: the target or the dataset changed; "
            "restore them or start a new run"
        )


def check_same_target(plan: RunPlan, checkpoint: Checkpoint) -> None:
    """A drafter fits the very weights it was trained on."""
    stored, given = checkpoint.state["provenance"]["target"], plan.provenance["target"]
    if changed := [key for key in given if key != "name" and stored.get(key) != given[key]]:
        raise ConfigError(
            f"target.path = {plan.config.target.path} is not the target of this run: its {', '.join(changed)} differ; "
            "restore it or start a new run"
        )


def warn_of_other_numerics(folder: RunFolder, plan: RunPlan, report: Callable[..., None]) -> None:
    now = numerics(plan)
    before = json.loads((folder.path / "manifest.json").read_text()).get("numerics", now)
    for name, value in now.items():
        if before.get(name) != value:
            log.warning(
                "%s: %s now, %s before: the run goes on, but not bit for bit as it would have",
                name,
                value,
                before.get(name),
            )
            report("numerics_changed", name=name, before=before.get(name), now=value)


def manifest_facts(plan: RunPlan) -> dict[str, Any]:
    return {
        "target": plan.provenance["target"],
        "dataset": {"path": plan.config.data.path, **plan.provenance["dataset"]},
        "drafter": plan.spec.to_dict(),
        "numerics": numerics(plan),
    }


def numerics(plan: RunPlan) -> dict[str, Any]:
    """What the last bits of the weights depend on beside settings, data and seed."""
    return {"devices": device_names(), "threads": plan.threads, "torch": version("torch")}


def device_names() -> list[str]:
    """Asked of the driver's own tool, so that this process, which starts the others, never touches CUDA."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ["cpu"]
    return listed.stdout.split("\n")[:-1]


def stop_rule(signalled: Callable[[], str | None], minutes: float | None) -> Callable[[], str | None]:
    """Why to stop before the next optimizer step: a signal, or `train.time_limit_minutes`."""
    started = time.monotonic()

    def reason() -> str | None:
        if name := signalled():
            return name
        if minutes is not None and time.monotonic() - started >= 60 * minutes:
            return f"train.time_limit_minutes {minutes:g} reached"
        return None

    return reason


@contextmanager
def stop_signals() -> Iterator[Callable[[], str | None]]:
    """The first SIGINT or SIGTERM asks for a stop after the open optimizer step; a second one ends at once."""
    received: list[str] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)
        for again in (signal.SIGINT, signal.SIGTERM):
            signal.signal(again, signal.SIG_DFL)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
