"""A drafter with all that trains it, fresh or from a checkpoint. The same in every process arrangement."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

import torch

from draftmill.config.resolve import decay_gamma
from draftmill.config.schema import Config
from draftmill.config.spec import DrafterSpec
from draftmill.drafter.network import Drafter
from draftmill.drafter.vocabulary import FrozenVocabulary
from draftmill.train.checkpoint import Checkpoint, write_tensors
from draftmill.train.choose import Choice, ChoosingStep, MicroStep
from draftmill.train.feed import Feed
from draftmill.train.fixed_step import ComputeWeights, FixedStep, fixed_shape
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
        rank: int = 0,
    ) -> None:
        self._rank, self._gamma = rank, decay_gamma(config.train.loss, spec.block_size)
        self.choice = Choice("eager", "the only mode of a CPU" if device.type == "cpu" else "not chosen yet")
        self._config, self._spec, self._vocabulary, self._device = config, spec, vocabulary, device
        self.drafter = Drafter(spec)
        self.drafter.initialise(config.train.seed)
        self.drafter.to(device)
        if device.type == "cuda":  # captures want one stream of their own, from the first call on
            torch.cuda.set_stream(torch.cuda.Stream(device))
        self._gradients = FlatGradients(self.drafter, spec.block_size - 1)
        self._weights: ComputeWeights | None = None
        if self._wanted() != "eager":
            self._weights = ComputeWeights(self.drafter, getattr(torch, config.train.dtype))
        compute = self._weights.flat if self._weights else None
        self._optimizer = Optimizer(self.drafter, self._gradients, config.train, compute)
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
            micro_step=self._micro_step(),
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

    def _wanted(self) -> str:
        """The mode to step in; `auto` while it is not chosen. What the run has chosen once holds."""
        wanted = self._config.train.step_mode
        if wanted != "auto":
            return wanted
        if self._device.type != "cuda":
            return "eager"
        choice = Choice.read(self._config.run.dir)
        return choice.mode if choice else "auto"

    def _micro_step(self) -> MicroStep:
        wanted = self._wanted()
        if wanted == "eager":
            return self._eager()
        if wanted != "auto":
            step = self._fixed(wanted)
            self._settle(Choice(wanted, "as set"), step)
            return step
        candidates = {mode: partial(self._fixed, mode) for mode in ("graph", "compile")}
        return ChoosingStep(self._eager(), candidates, self._gradients, self._config.train.dtype, self._settle)

    def _settle(self, choice: Choice, step: MicroStep) -> None:
        if choice.mode == "graph":
            self._optimizer.capture()
        self.choice = choice
        if self._rank == 0:
            choice.write(self._config.run.dir)

    def _eager(self) -> EagerStep:
        return EagerStep(self.drafter, self._vocabulary, self._config.train, self._gamma, self._gradients)

    def _fixed(self, mode: str) -> FixedStep:
        data, train = self._config.data, self._config.train
        shape = fixed_shape(data.pack_tokens, data.anchor_rate, self._spec.block_size)
        assert self._weights is not None
        return FixedStep(
            self._weights, self._vocabulary, train, self._gamma, shape, self._gradients, captured=mode == "graph"
        )

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
