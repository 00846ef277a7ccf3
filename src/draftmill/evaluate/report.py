"""`evaluate`: one call from target, drafter and prompts to the numbers that describe a drafter.

No speeds: acceptance is a property of the drafter, speed one of the engine that serves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftmill.drafter.network import Drafter
from draftmill.evaluate.acceptance import Acceptance, measure
from draftmill.evaluate.decode import BATCH, draft_and_verify, plain_greedy
from draftmill.evaluate.lossless import Lossless, compare_with_plain
from draftmill.evaluate.responses import OnProgress, Response
from draftmill.target.model import Target


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    acceptance: Acceptance
    lossless: Lossless | None  # None where the check was not asked for
    block_size: int
    max_new_tokens: int
    dtype: str  # the target's, and so the drafter's compute dtype
    prompts: int
    generated_tokens: int
    responses: tuple[Response, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Rounds and texts are left out; `responses` has them."""
        return {
            "acceptance": self.acceptance.to_dict(),
            "lossless": None if self.lossless is None else self.lossless.to_dict(),
            "block_size": self.block_size,
            "max_new_tokens": self.max_new_tokens,
            "dtype": self.dtype,
            "prompts": self.prompts,
            "generated_tokens": self.generated_tokens,
        }

    def table(self) -> str:
        return "\n".join(_lines(self))


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    stop_ids: frozenset[int] | None = None,
    batch_size: int = BATCH,
    check_lossless: bool = True,
    plain: list[Response] | None = None,
    epsilon: float | None = None,
    on_progress: OnProgress | None = None,
) -> EvaluationReport:
    """Decode with the drafter and, for the lossless check, without it.

    `plain` hands in plain greedy answers made earlier with the same target, prompts and limits (two drafters
    of one target need them only once).
    """
    if not prompts:
        raise ValueError("no prompts to evaluate: give at least one")
    common: dict[str, Any] = {"stop_ids": stop_ids, "batch_size": batch_size, "on_progress": on_progress}
    drafted = draft_and_verify(target, drafter, prompts, max_new_tokens, **common)
    lossless = None
    if check_lossless:
        if plain is None:
            plain = plain_greedy(target, prompts, max_new_tokens, **common)
        lossless = compare_with_plain(target, prompts, plain, drafted, epsilon=epsilon)
    return EvaluationReport(
        acceptance=measure(drafted, drafter.spec.block_size),
        lossless=lossless,
        block_size=drafter.spec.block_size,
        max_new_tokens=max_new_tokens,
        dtype=str(target.dtype).removeprefix("torch."),
        prompts=len(prompts),
        generated_tokens=sum(len(response.tokens) for response in drafted),
        responses=tuple(drafted),
    )


def _lines(report: EvaluationReport) -> list[str]:
    found = report.acceptance
    lines = [
        f"prompts        {report.prompts} (at most {report.max_new_tokens} new tokens, {report.dtype})",
        f"tokens         {report.generated_tokens} generated, {found.tokens} of them in {found.rounds} rounds",
        f"tau            {_number(found.tau)}  95 % {_interval(found.tau_interval)}  over {found.responses} responses",
        f"pooled         {_number(found.pooled)}  95 % {_interval(found.pooled_interval)}",
        f"full blocks    {_percent(found.full_blocks)} of {report.block_size - 1} drafted tokens",
    ]
    lines += [f"not counted    {count}: {reason}" for reason, count in found.excluded.items()]
    lines.append("slot           " + " ".join(f"{slot:>6}" for slot in range(1, report.block_size)))
    lines.append("accepted       " + " ".join(f"{_percent(share):>6}" for share in found.slot_accepted))
    lines.append("if reached     " + " ".join(f"{_percent(share):>6}" for share in found.slot_conditional))
    lines.append("lossless       " + _lossless_line(report.lossless, report.dtype))
    return lines


def _lossless_line(lossless: Lossless | None, dtype: str) -> str:
    if lossless is None:
        return "not checked"
    total = lossless.identical + lossless.ties + lossless.violated
    line = f"{lossless.identical} of {total} texts equal plain greedy decoding"
    if lossless.ties:
        line += f", {lossless.ties} part at a tie (epsilon {lossless.epsilon} in {dtype})"
    if lossless.violated:
        first = next(difference for difference in lossless.differences if difference.verdict == "violated")
        line += f"; VIOLATED in {lossless.violated}, first: prompt {first.prompt}, token {first.position}"
    return line


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _interval(bounds: tuple[float, float] | None) -> str:
    return "-" if bounds is None else f"[{bounds[0]:.3f}, {bounds[1]:.3f}]"
