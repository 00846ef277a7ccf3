"""A drafter with all that trains it, fresh or from a checkpoint. The same in every process arrangement."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from draftmill.config.resolve import decay_gamma
from draftmill.config.schema import Config
from draftmill.config.spec import DrafterSpec
from draftmill.drafter.network import Drafter
from draftmill.drafter.vocabulary import FrozenVocabulary
from draftmill.train.checkpoint import Checkpoint, write_tensors
from draftmill.train.feed import Feed
from draftmill.train.gradients import Exchange, FlatGradients
from draftmill.train.loop import StepRecord, TrainRun, train
from draftmill.train.optimizer import Optimizer
from draftmill.train.step import EagerStep


class DrafterSession:
    def __init__(
        self,
        config: Config,
        spec: DrafterSpec,
        vocabulary: FrozenVocabulary,
        device: torch.device,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._config, self._spec, self._vocabulary, self._device = config, spec, vocabulary, device
        self.drafter = Drafter(spec)
        self.drafter.initialise(config.train.seed)
        self.drafter.to(device)
        self._gradients = FlatGradients(self.drafter, spec.block_size - 1)
        self._optimizer = Optimizer(self.drafter, self._gradients, config.train)
        self._restored = checkpoint is not None
        self.step = 0
        if checkpoint is not None:
            self.drafter.load_state_dict(checkpoint.drafter)
            self._optimizer.load(checkpoint.optimizer)
            self._optimizer.refresh()
            self.step = checkpoint.step

    def train(
        self,
        steps: int,
        feed: Feed,
        exchange: Exchange,
        record: Callable[[StepRecord], None],
        save: Callable[[int], None],
    ) -> str:
        """Train until `steps` or a stop; why it ended."""
        config, spec = self._config, self._spec
        run = TrainRun(
            config=config.train,
            steps=steps,
            device=self._device,
            feed=feed,
            micro_step=EagerStep(
                self.drafter,
                self._vocabulary,
                config.train,
                decay_gamma(config.train.loss, spec.block_size),
                self._gradients,
            ),
            gradients=self._gradients,
            exchange=exchange,
            optimizer=self._optimizer,
            record=record,
            save=save,
            checkpoint_every=config.run.checkpoint_every,
            slots=spec.block_size - 1,
            step=self.step,
            saved=self.step if self._restored else -1,
        )
        if not self._restored:
            run.save_once()  # to compare with; and a full or read-only disk shows now, not hours later
        reason = train(run)
        self.step = run.step
        return reason

    def write(self, step: int) -> None:
        """This drafter's half of checkpoint `step`."""
        root = self._config.run.dir / "checkpoints"
        write_tensors(root, step, self.drafter.state_dict(), self._optimizer.state())

    def digest(self) -> str:
        """Of the weights, bit for bit."""
        sha = hashlib.sha256()
        for name, tensor in sorted(self.drafter.state_dict().items()):
            sha.update(name.encode())
            sha.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()
