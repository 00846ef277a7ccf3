"""The training objective: cross-entropy of the tokens that slots predict, weighted by slot.

Everything is a sum with its own denominator; nothing is divided before the whole optimizer step is summed.
A blocks, B slots, N = A * (B - 1) scored rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from draftmill.config.schema import LossConfig
from draftmill.drafter.vocabulary import FrozenVocabulary

LOGITS_AT_ONCE = 2**27  # logits held at one time, in elements: 256 MiB in bfloat16, and as much for their gradient
WHOLE_ROWS = 128  # chunks are multiples of it where they can be: matrix products like that

# (raw logits [R, V], labels int64 [R], vocabulary) -> (CE float32 [R], label most likely bool [R],
# d CE / d raw logits [R, V] in the logits' dtype)
ChunkTerms = Callable[[Tensor, Tensor, FrozenVocabulary], tuple[Tensor, Tensor, Tensor]]


class FrozenHeadCrossEntropy(torch.autograd.Function):
    """Cross-entropy through a frozen head. Logits exist chunk by chunk, and each chunk forms its own gradient.

    The head is frozen, so d CE / d hidden = (softmax - onehot) @ head is all a row ever needs; it is kept per row
    and scaled by the row's weight in backward, exact because the loss is linear in CE.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, vocabulary: FrozenVocabulary, labels: Tensor, terms: ChunkTerms
    ) -> tuple[Tensor, Tensor]:
        cross_entropy = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        hit = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden)
        head = vocabulary.head.to(hidden.dtype)
        rows = max(1, LOGITS_AT_ONCE // len(head))
        rows = rows // WHOLE_ROWS * WHOLE_ROWS or rows
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            cross_entropy[chunk], hit[chunk], residual = terms(hidden[chunk] @ head.T, labels[chunk], vocabulary)
            torch.mm(residual, head, out=gradient[chunk])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hit)
        return cross_entropy, hit

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (upstream[0][:, None] * gradient.float()).to(gradient.dtype), None, None, None


def chunk_terms(raw: Tensor, labels: Tensor, vocabulary: FrozenVocabulary) -> tuple[Tensor, Tensor, Tensor]:
    """`ChunkTerms` in plain operations: the reference, and what is compiled elsewhere."""
    logits = vocabulary.scale(raw).float()
    label = labels[:, None]
    log_total = torch.logsumexp(logits, dim=1, keepdim=True)
    cross_entropy = log_total - logits.gather(1, label)
    softmax = torch.exp(logits - log_total)
    is_label = torch.arange(logits.shape[1], device=raw.device) == label
    residual = torch.where(is_label, softmax - 1, softmax)
    slope = _scale_slope(vocabulary, logits)
    if slope is not None:
        residual = residual * slope
    return cross_entropy[:, 0], logits.argmax(dim=1) == labels, residual.to(raw.dtype)


def _scale_slope(vocabulary: FrozenVocabulary, logits: Tensor) -> Tensor | float | None:
    """d `vocabulary.scale`(raw) / d raw, from its result."""
    slope: Tensor | float | None = None if vocabulary.output_multiplier == 1.0 else vocabulary.output_multiplier
    if vocabulary.logit_softcap is not None:
        slope = (1 - (logits / vocabulary.logit_softcap) ** 2) * vocabulary.output_multiplier
    return slope


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    """Sums over one micro-step, on the device. `numerator` alone carries a gradient."""

    numerator: Tensor  # float32 [], sum of weight * CE
    denominator: Tensor  # float32 [], sum of weights
    counted: Tensor  # float32 [B - 1], rows scored per slot
    hits: Tensor  # float32 [B - 1], of these the label was the most likely token
    survived: Tensor  # float32 [B - 1], of these every slot up to here hit
    cross_entropy: Tensor  # float32 [B - 1], unweighted sum of CE

    @classmethod
    def zero(cls, slots: int, device: torch.device) -> LossSums:
        """Sums over nothing, for `slots` = B - 1 predicting slots."""
        scalar, per_slot = torch.zeros((), device=device), torch.zeros(slots, device=device)
        return cls(scalar, scalar, per_slot, per_slot, per_slot, per_slot)

    def plus(self, other: LossSums) -> LossSums:
        """The sums of both, without gradient."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return LossSums(*(a.detach() + b.detach() for a, b in pairs))


def loss_sums(cross_entropy: Tensor, hit: Tensor, counted: Tensor, loss: LossConfig, gamma: float) -> LossSums:
    """cross_entropy float32, hit bool, counted bool, all [A, B - 1]; column j is slot j + 1."""
    weight = slot_weights(cross_entropy.detach(), counted, loss, gamma)
    mask = counted.float()
    hits = hit.float() * mask
    return LossSums(
        # uncounted rows are cut out, not multiplied by zero: 0 * inf would be nan
        numerator=(weight * torch.where(counted, cross_entropy, 0.0)).sum(),
        denominator=weight.sum(),
        counted=mask.sum(0),
        hits=hits.sum(0),
        survived=hits.cumprod(dim=1).sum(0),
        cross_entropy=torch.where(counted, cross_entropy, 0.0).detach().sum(0),
    )


def slot_weights(cross_entropy: Tensor, counted: Tensor, loss: LossConfig, gamma: float) -> Tensor:
    """float32 [A, B - 1], zero where uncounted, without gradient.

    decay: exp(-(k - 1) / gamma) for slot k >= 1 (DFlash, eq. 4).
    dpace: q = p(label), s = (1 - alpha) q + alpha, weight_j = sum over m >= j of prod over i <= m of s_i, over the
    counted slots (D-PACE, arXiv 2605.18810).
    """
    if loss.kind == "decay":
        slot = torch.arange(counted.shape[1], device=counted.device)
        return torch.exp(-slot / gamma) * counted
    survival = (1 - loss.alpha) * torch.exp(-cross_entropy) + loss.alpha
    reached = torch.where(counted, survival, 1.0).cumprod(dim=1) * counted
    return reached.flip(1).cumsum(dim=1).flip(1) * counted
