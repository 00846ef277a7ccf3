"""AdamW over flat tensors: one pass that reads and writes each number once.

    first  <- first + (1 - beta1) (g - first)              g = gradient * scale
    second <- beta2 second + (1 - beta2) g^2
    weight <- weight (1 - lr decay) - lr / c1 * first / (sqrt(second / c2) + eps)
    compute <- weight, in the compute dtype

c1, c2 = 1 - beta^t. Source: Loshchilov and Hutter, arXiv 1711.05101. What changes from step to step comes as a
tensor on the device, so that the pass can be captured. The plain version is the reference, and what a CPU runs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

SCALE, LR, CORRECTION_1, CORRECTION_2, APPLIED = range(5)  # places in `scalars`, float32


def adamw_(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    compute: Tensor | None,
    scalars: Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    """In place on flat float32 tensors of one length; `compute` is written, too. Nothing moves where APPLIED is 0."""
    if weight.is_cuda:
        _kernel()(weight, gradient, first, second, compute, scalars, betas, eps, decay)
    else:
        _plain(weight, gradient, first, second, compute, scalars, betas, eps, decay)


def _plain(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    compute: Tensor | None,
    scalars: Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    scale, lr, correction_1, correction_2, applied = scalars.tolist()
    if not applied:
        return
    gradient = gradient * scale
    first.lerp_(gradient, 1 - betas[0])
    second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    weight.mul_(1 - lr * decay)
    weight.addcdiv_(first, (second / correction_2).sqrt_().add_(eps), value=-lr / correction_1)
    if compute is not None:
        compute.copy_(weight)


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(  # type: ignore[no-untyped-def]
        weight_at, gradient_at, first_at, second_at, compute_at, scalars_at, count,
        beta1, beta2, eps, decay, writes_compute: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        if tl.load(scalars_at + 4) == 0.0:
            return
        scale = tl.load(scalars_at)
        lr = tl.load(scalars_at + 1)
        correction_1 = tl.load(scalars_at + 2)
        correction_2 = tl.load(scalars_at + 3)
        at = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
        inside = at < count
        gradient = tl.load(gradient_at + at, mask=inside, other=0.0) * scale
        first = tl.load(first_at + at, mask=inside, other=0.0)
        second = tl.load(second_at + at, mask=inside, other=0.0)
        weight = tl.load(weight_at + at, mask=inside, other=0.0)
        first += (1 - beta1) * (gradient - first)
        second = beta2 * second + (1 - beta2) * gradient * gradient
        weight = weight * (1 - lr * decay)
        weight -= lr / correction_1 * first / (tl.sqrt(second / correction_2) + eps)
        tl.store(first_at + at, first, mask=inside)
        tl.store(second_at + at, second, mask=inside)
        tl.store(weight_at + at, weight, mask=inside)
        if writes_compute:
            tl.store(compute_at + at, weight.to(compute_at.dtype.element_ty), mask=inside)

    def run(
        weight: Tensor,
        gradient: Tensor,
        first: Tensor,
        second: Tensor,
        compute: Tensor | None,
        scalars: Tensor,
        betas: tuple[float, float],
        eps: float,
        decay: float,
    ) -> None:
        count, size = weight.numel(), 2048
        if count == 0:
            return
        kernel[((count + size - 1) // size,)](
            weight, gradient, first, second, weight if compute is None else compute, scalars, count,
            betas[0], betas[1], eps, decay, writes_compute=compute is not None, size=size, num_warps=8,
        )  # fmt: skip

    return run
