"""Does drafting change the text? Compared token by token with plain greedy decoding of the same target.

float32: the texts must be equal. bfloat16: they may part where the target itself is undecided, that is where
both chosen tokens' logits lie within epsilon of the best one. A difference anywhere else is a violation.

Why bfloat16 parts at all: a pass over one token and a pass over a block round differently. Measured on
SmolLM2-135M in bfloat16 (512 positions, blocks of 8 and 16, CPU): the distance of the two best logits changed
by 0.06 in the median, 0.25 in the 99th percentile and 0.375 at most, at logits around 25, where neighbouring
bfloat16 numbers lie 0.125 apart. Hence the default of 0.5. Every gap is reported, so a stricter reader can judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from draftmill.evaluate.responses import Response
from draftmill.evaluate.verifier import Verifier
from draftmill.target.model import Target

EPSILON = {torch.float32: 0.0, torch.bfloat16: 0.5}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a response first differs from plain decoding."""

    prompt: int
    position: int  # index among the generated tokens
    plain: int | None  # token of plain decoding; None where its text had ended
    drafted: int | None
    gap: float | None  # best logit minus the lower of the two tokens' logits; None where a text had ended
    verdict: Literal["tie", "violated"]


@dataclass(frozen=True, slots=True)
class Lossless:
    epsilon: float
    identical: int
    ties: int
    violated: int
    differences: tuple[Difference, ...]

    @property
    def holds(self) -> bool:
        return self.violated == 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


@torch.no_grad()
def compare_with_plain(
    target: Target,
    prompts: list[list[int]],
    plain: Sequence[Response],
    drafted: Sequence[Response],
    *,
    epsilon: float | None = None,
) -> Lossless:
    """`epsilon` None takes the default of the target's dtype."""
    if epsilon is None:
        epsilon = EPSILON.get(target.dtype, 0.0)
    found = []
    for index, (want, have) in enumerate(zip(plain, drafted, strict=True)):
        position = first_difference(want.tokens, have.tokens)
        if position is not None:
            found.append(_judge(target, prompts[index], index, position, want.tokens, have.tokens, epsilon))
    ties = sum(difference.verdict == "tie" for difference in found)
    return Lossless(epsilon, len(plain) - len(found), ties, len(found) - ties, tuple(found))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs; the shorter length where one continues the other; None if equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def _judge(
    target: Target,
    prompt: list[int],
    index: int,
    position: int,
    plain: Sequence[int],
    drafted: Sequence[int],
    epsilon: float,
) -> Difference:
    if position >= min(len(plain), len(drafted)):  # one text ended early: no tie can explain that
        token = [text[position] if position < len(text) else None for text in (plain, drafted)]
        return Difference(index, position, token[0], token[1], None, "violated")
    prefix = [*prompt, *plain[:position]]
    logits = Verifier(target, len(prefix)).prefill([prefix])[0].float()
    both = logits[[plain[position], drafted[position]]]
    gap = float(logits.max() - both.min())
    # float32 has epsilon 0: even equal logits are no excuse for a difference there
    verdict: Literal["tie", "violated"] = "tie" if epsilon > 0 and gap <= epsilon else "violated"
    return Difference(index, position, plain[position], drafted[position], gap, verdict)
