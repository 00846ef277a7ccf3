"""A whole training run in one process: everything is checked first, then loaded, then trained or resumed.

The order matters: settings and dataset are refused before the target is loaded, the target before the run
folder records a start, and a checkpoint is restored before the first pack is planned.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from draftmill.config.load import ConfigError
from draftmill.config.resolve import decay_gamma, resolve_spec
from draftmill.config.schema import Config
from draftmill.config.spec import DrafterSpec
from draftmill.drafter.network import Drafter
from draftmill.observe.console import Progress
from draftmill.observe.metrics import EventLog, MetricsLog
from draftmill.run.folder import RunFolder
from draftmill.run.inprocess import InProcessFeed
from draftmill.run.ledger import Ledger
from draftmill.run.recording import Recorder, device_name
from draftmill.slots.memory import LocalSlots
from draftmill.slots.pool import SlotPool
from draftmill.target.loading import config_hash
from draftmill.target.model import Target
from draftmill.text.dataset import PreparedDataset
from draftmill.text.identity import tokenizer_identity
from draftmill.text.packing import PackStream
from draftmill.train.checkpoint import Checkpoint, complete_checkpoints, load_checkpoint, save_checkpoint
from draftmill.train.loop import FINISHED, TrainRun, train
from draftmill.train.optimizer import Optimizer
from draftmill.train.step import EagerStep

log = logging.getLogger(__name__)

SLOTS = 1  # packs are filled when asked for: one place is all that one process can use


@dataclass(frozen=True, slots=True)
class TrainResult:
    reason: str  # FINISHED, or why it stopped before the end
    step: int
    steps: int
    checkpoint: Path  # the newest
    ended: dict[str, int]  # documents over all epochs, by how they ended


def run_training(config: Config, resume: bool = False) -> TrainResult:
    """Train the drafter that `config` describes, in `config.run.dir`.

    Raises ConfigError for settings that cannot be used, ValueError for a dataset or target that does not fit.
    """
    dataset = PreparedDataset.open(config.data.path)
    spec = resolve_spec(config, mask_token(config, dataset))
    decay_gamma(config.train.loss, spec.block_size)  # refused here, not after the target is loaded
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    with RunFolder(config, resume) as folder, EventLog(folder.path / "events.jsonl") as events:
        restored = newest_checkpoint(folder, events.event) if resume else None
        target = Target.load(config.target.path, config.target.dtype, config.target.device, spec.target_layer_ids)
        dataset.check_target({"config_hash": config_hash(config.target.path), **tokenizer_identity(target.tokenizer)})
        spec = replace(spec, **asdict(target.quirks))
        session = Session(config, folder, dataset, target, spec, events, restored)
        return session.run()


def mask_token(config: Config, dataset: PreparedDataset) -> int:
    """`drafter.mask_token_id`, or the dataset's."""
    chosen = config.drafter.mask_token_id
    if chosen is None:
        chosen = dataset.manifest["mask_token"]["id"]
    return int(chosen)


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


class Session:
    """One process's share of a run, from start or resume to end or stop."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        dataset: PreparedDataset,
        target: Target,
        spec: DrafterSpec,
        events: EventLog,
        restored: Checkpoint | None,
    ) -> None:
        self.config, self.folder, self.spec, self.events = config, folder, spec, events
        self.device = target.device if config.run.device == "auto" else torch.device(config.run.device)
        self.drafter = Drafter(spec)
        self.drafter.initialise(config.train.seed)
        self.drafter.to(self.device)
        self.optimizer = Optimizer(self.drafter, config.train)
        position = restored.state["position"] if restored else None
        self.stream = PackStream(dataset, config.data, config.train.seed, position)
        self.ledger = Ledger(len(dataset))
        self.steps, self.end = run_length(config, dataset)
        self.step = 0
        if restored:
            self._restore(restored)
        self.folder.write_manifest(
            target=target.identity(),
            dataset={"path": config.data.path, "fingerprint": dataset.fingerprint, "rows": len(dataset)},
            drafter=spec.to_dict(),
            parameters=sum(p.numel() for p in self.drafter.parameters()),
            device=device_name(self.device),
            threads=torch.get_num_threads(),
            packed_documents=target.packs,
        )
        memory = LocalSlots(SLOTS, config.data.pack_tokens, spec.feature_size, target.dtype, self.device)
        self.provenance = {
            "target": target.identity(),
            "token_ids": {name: getattr(target.tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")},
            "template_options": dataset.manifest["template_options"],
            "dataset": {"fingerprint": dataset.fingerprint, "rows": len(dataset)},
        }
        self.feed = InProcessFeed(
            self.stream, target, SlotPool(SLOTS), memory, self.ledger, self.end, self.events.event
        )
        self.micro_step = EagerStep(
            self.drafter, target.vocabulary(), config.train, decay_gamma(config.train.loss, spec.block_size)
        )

    def run(self) -> TrainResult:
        run = self.config.run
        self.events.event("resumed" if self.step else "started", step=self.step, steps=self.steps)
        with (
            MetricsLog(self.folder.path / "metrics.jsonl") as metrics,
            Progress(self.steps, self.step) as progress,
            stop_signals() as signalled,
        ):
            metrics.truncate_after(self.step)
            self.recorder = Recorder(self.ledger, metrics, progress, run.log_every, self.events.event)
            training = TrainRun(
                config=self.config.train,
                steps=self.steps,
                device=self.device,
                feed=self.feed,
                micro_step=self.micro_step,
                optimizer=self.optimizer,
                record=self.recorder,
                save=self.save,
                stop_reason=stop_rule(signalled, self.config.train.time_limit_minutes),
                checkpoint_every=run.checkpoint_every,
                slots=self.spec.block_size - 1,
                step=self.step,
            )
            if not self.step:
                training.save_once()  # to compare with; and a full or read-only disk shows now, not hours later
            reason = train(training)
        self.events.event("finished" if reason == FINISHED else "stopped", step=training.step, reason=reason)
        newest = complete_checkpoints(self.folder.checkpoints)[0][-1]
        return TrainResult(reason, training.step, self.steps, newest, self.ledger.totals())

    def save(self, step: int) -> None:
        """A checkpoint after `step` optimizer steps. A full disk ends the run; older checkpoints stay valid."""
        self.recorder.flush()
        ledger_state, ledger_tensors = self.ledger.state()
        state: dict[str, Any] = {
            "spec": self.spec.to_dict(),
            "position": self.stream.position,
            "ledger": ledger_state,
            "steps": self.steps,
            "provenance": self.provenance,
            "config": self.config.model_dump(mode="json"),
        }
        checkpoint = Checkpoint(step, self.drafter.state_dict(), self.optimizer.state(), ledger_tensors, state)
        path = save_checkpoint(self.folder.checkpoints, checkpoint, self.config.run.keep_checkpoints)
        self.events.event("checkpoint", step=step, path=path)

    def _restore(self, checkpoint: Checkpoint) -> None:
        stored = DrafterSpec.from_dict(checkpoint.state["spec"])
        if stored != self.spec:
            changed = {k: v for k, v in self.spec.to_dict().items() if stored.to_dict()[k] != v}
            raise ConfigError(
                f"the checkpoint's drafter differs from this one in {changed}: the target or the dataset changed; "
                "restore them or start a new run"
            )
        self.drafter.load_state_dict(checkpoint.drafter)
        self.optimizer.load(checkpoint.optimizer)
        self.ledger = Ledger.restore(checkpoint.state["ledger"], checkpoint.ledger)
        self.step = checkpoint.step


def run_length(config: Config, dataset: PreparedDataset) -> tuple[int, int | None]:
    """Optimizer steps of the whole run, and the seq after its last pack (None where steps decide)."""
    if config.train.steps is not None:
        return config.train.steps, None
    planned = PackStream(dataset, config.data, config.train.seed)
    packs = sum(planned.packs_in_epoch(epoch) for epoch in range(config.train.epochs or 0))
    return -(-packs // config.train.accumulation), packs


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
