"""One optimizer step: divide by the step's denominator, clip, check, update. Decided on the device.

Gradients arrive as sums over the whole optimizer step (all drafters, all micro-steps); a step that is not
finite or has nothing to learn leaves weights, moments and step counters untouched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftmill.config.schema import TrainConfig
from draftmill.train.gradients import FlatGradients


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What one optimizer step did, still on the device."""

    gradient_norm: Tensor  # float32 [], after the division, before the clip
    applied: Tensor  # bool []: False where the step was not finite or its denominator was zero
    finite: Tensor  # bool []


class Optimizer:
    """AdamW over float32 masters. Matrices are decayed, norms never."""

    def __init__(self, module: nn.Module, gradients: FlatGradients, train: TrainConfig) -> None:
        self._clip = train.clip
        self._gradients = gradients
        self._parameters = dict(module.named_parameters())
        matrices = [p for p in self._parameters.values() if p.ndim > 1]
        norms = [p for p in self._parameters.values() if p.ndim == 1]
        self._adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": train.weight_decay}, {"params": norms, "weight_decay": 0.0}],
            lr=train.lr,
            betas=train.betas,
            eps=train.eps,
            fused=True,
        )

    @torch.no_grad()
    def update(self, numerator: Tensor, denominator: Tensor, lr: float) -> Update:
        """Apply the accumulated gradients of sum(weight * CE) over `denominator`, then clear them."""
        gradient = self._gradients.gradient
        gradient.div_(torch.where(denominator > 0, denominator, 1.0))
        norm = torch.linalg.vector_norm(gradient)
        gradient.mul_((self._clip / (norm + 1e-6)).clamp(max=1.0))
        finite = torch.isfinite(norm) & torch.isfinite(numerator)
        applied = finite & (denominator > 0)
        # the fused kernel's own switch, as torch.amp uses it: nothing moves where it is set
        self._adamw.grad_scale = None  # type: ignore[attr-defined]
        self._adamw.found_inf = (~applied).float()  # type: ignore[attr-defined]
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._gradients.clear()
        return Update(norm, applied, finite)

    def state(self) -> dict[str, Tensor]:
        """Moments and step counters by parameter name: `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            state = self._adamw.state[parameter] or _fresh_state(parameter)
            tensors.update({f"{key}.{name}": value for key, value in state.items()})
        return tensors

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Inverse of `state`. Raises ValueError where names or shapes differ."""
        expected = {f"{key}.{name}" for name in self._parameters for key in ("exp_avg", "exp_avg_sq", "step")}
        if set(tensors) != expected:
            raise ValueError(
                f"optimizer state does not fit: {sorted(set(tensors) ^ expected)[:4]} are on one side only"
            )
        for name, parameter in self._parameters.items():
            fresh = _fresh_state(parameter)
            for key, value in fresh.items():
                stored = tensors[f"{key}.{name}"]
                if stored.shape != value.shape:
                    raise ValueError(f"{key}.{name} has shape {tuple(stored.shape)}, expected {tuple(value.shape)}")
                value.copy_(stored)
            self._adamw.state[parameter] = fresh


def _fresh_state(parameter: Tensor) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
