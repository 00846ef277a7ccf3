"""One optimizer step: divide by the step's denominator, clip, check, update. Decided on the device.

Gradients arrive as sums over the whole optimizer step (all drafters, all micro-steps); a step that is not
finite or has nothing to learn leaves weights, moments and the step counter untouched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftmill.config.schema import TrainConfig
from draftmill.train.adamw import adamw_
from draftmill.train.gradients import FlatGradients, flat_order, views_of


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What one optimizer step did, still on the device."""

    gradient_norm: Tensor  # float32 [], after the division, before the clip
    applied: Tensor  # bool []: False where the step was not finite or its denominator was zero
    finite: Tensor  # bool []


class Optimizer:
    """AdamW over float32 masters. Matrices are decayed, norms never.

    Owns the masters' memory: `module`'s parameters become views of one flat tensor. `compute`: a flat copy of them in
    the compute dtype, written anew by each update.
    """

    def __init__(
        self, module: nn.Module, gradients: FlatGradients, train: TrainConfig, compute: Tensor | None = None
    ) -> None:
        self._train, self._gradients, self._compute = train, gradients, compute
        parameters = flat_order(module)
        self._names = list(parameters)
        self._matrices = sum(parameter.numel() for parameter in parameters.values() if parameter.ndim > 1)
        like = [parameter.detach() for parameter in parameters.values()]
        self._weights = torch.cat([tensor.reshape(-1) for tensor in like])
        for parameter, view in zip(parameters.values(), views_of(self._weights, like), strict=True):
            parameter.data = view
        self._first, self._second = torch.zeros_like(self._weights), torch.zeros_like(self._weights)
        self._moments = {
            f"{moment}.{name}": view
            for moment, flat in (("exp_avg", self._first), ("exp_avg_sq", self._second))
            for name, view in zip(self._names, views_of(flat, like), strict=True)
        }
        device = self._weights.device
        self._updates = torch.zeros((), device=device)  # applied so far
        self._inputs = torch.zeros(3, device=device)  # numerator, denominator, learning rate
        self._outcome = torch.zeros(3, device=device)  # gradient norm, applied, finite
        self._graph: torch.cuda.CUDAGraph | None = None
        self.refresh()

    @torch.no_grad()
    def update(self, numerator: Tensor, denominator: Tensor, lr: float) -> Update:
        """Apply the accumulated gradients of sum(weight * CE) over `denominator`; they are stale afterwards."""
        self._inputs[0].copy_(numerator)
        self._inputs[1].copy_(denominator)
        self._inputs[2].fill_(lr)
        if self._graph is None:
            self._advance()
        else:
            self._graph.replay()
        self._gradients.stale = True
        norm, applied, finite = self._outcome.clone()
        return Update(norm, applied.bool(), finite.bool())

    @torch.no_grad()
    def capture(self) -> None:
        """From now on an update is one CUDA graph. For the stream that the step was captured on; moves nothing."""
        self._inputs.zero_()  # no weight: the warm-up applies nothing
        self._advance()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self._advance()
        self._graph = graph

    def _advance(self) -> None:
        train, gradient = self._train, self._gradients.gradient
        numerator, denominator, lr = self._inputs
        divisor = torch.where(denominator > 0, denominator, 1.0)
        norm = torch.linalg.vector_norm(gradient) / divisor
        finite = torch.isfinite(norm) & torch.isfinite(numerator)
        applied = finite & (denominator > 0)
        self._updates.add_(applied)
        scale = (train.clip / (norm + 1e-6)).clamp(max=1.0) / divisor
        corrections = [(1 - beta ** self._updates.double()).float() for beta in train.betas]
        scalars = torch.stack([scale, lr, *corrections, applied.float()])
        for part, decay in ((slice(self._matrices), train.weight_decay), (slice(self._matrices, None), 0.0)):
            adamw_(
                self._weights[part], gradient[part], self._first[part], self._second[part],
                None if self._compute is None else self._compute[part], scalars, train.betas, train.eps, decay,
            )  # fmt: skip
        torch.stack([norm, applied.float(), finite.float()], out=self._outcome)

    @torch.no_grad()
    def refresh(self) -> None:
        """The compute copy becomes the masters."""
        if self._compute is not None:
            self._compute.copy_(self._weights)

    def state(self) -> dict[str, Tensor]:
        """Moments by parameter name, `exp_avg.NAME` and `exp_avg_sq.NAME`, and `updates`, the number applied."""
        return {**self._moments, "updates": self._updates}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Inverse of `state`. Raises ValueError where names or shapes differ."""
        state = self.state()
        if set(tensors) != set(state):
            raise ValueError(
                f"optimizer state does not fit: {sorted(set(tensors) ^ set(state))[:4]} are on one side only"
            )
        for name, value in state.items():
            stored = tensors[name]
            if stored.shape != value.shape:
                raise ValueError(f"{name} has shape {tuple(stored.shape)}, expected {tuple(value.shape)}")
            value.copy_(stored)
