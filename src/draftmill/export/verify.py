"""The proof that an export loads and drafts the same elsewhere: the `dflash` package, compared round by round.

Every round's drafted tokens and every round's length must agree. A different token is a tie, and no fault,
only where the package itself was undecided: our token is one of its two best and their logits lie within
epsilon. After a tie has changed a round's length the two go on from different places, so the rest of that
prompt is not compared, and is counted as such.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

EPSILON = {torch.float32: 1e-4}  # rounding of two ways to compute the same float32 logits
EPSILON_OTHER = 0.5  # bfloat16, as in the lossless check


class RoundLike(Protocol):
    @property
    def start(self) -> int: ...
    @property
    def drafted(self) -> tuple[int, ...]: ...
    @property
    def produced(self) -> int: ...


class ResponseLike(Protocol):
    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def rounds(self) -> Sequence[RoundLike]: ...


@dataclass(slots=True)
class OracleReport:
    """`match` is the verdict; `compared` must be above zero for it to mean anything."""

    epsilon: float
    prompts: int = 0
    rounds: int = 0  # of the package
    compared: int = 0
    draft_ties: int = 0
    target_ties: int = 0
    uncompared: int = 0  # rounds after a tie had parted the two
    mismatches: list[str] = field(default_factory=list)

    @property
    def match(self) -> bool:
        return not self.mismatches

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "match": self.match}


@dataclass(frozen=True, slots=True)
class _Choice:
    """The package's choice at one place: its best token, the runner-up and the distance of their logits."""

    token: int
    second: int
    gap: float

    def tie(self, token: int, epsilon: float) -> bool:
        return token == self.second and self.gap <= epsilon


@dataclass(frozen=True, slots=True)
class _OracleRound:
    start: int
    drafted: list[_Choice]
    verified: list[_Choice]  # the target's own choice after each token of the block
    produced: int


def verify_with_dflash(
    folder: Path | str,
    hf_model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Sequence[int],
    responses: Sequence[ResponseLike],
    *,
    epsilon: float | None = None,
    on_prompt: Callable[[int], None] | None = None,
) -> OracleReport:
    """`responses`: ours, decoded with the drafter loaded from the same folder and the same target. `on_prompt` is told
    how many prompts are compared.
    """
    package = _import_dflash()
    dtype, device = next(hf_model.parameters()).dtype, next(hf_model.parameters()).device
    model = _load(package, folder, dtype).to(device).eval()
    report = OracleReport(EPSILON.get(dtype, EPSILON_OTHER) if epsilon is None else epsilon, len(prompts))
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if on_prompt is not None:
            on_prompt(index)
        first, rounds, tokens = _generate(package, model, hf_model, prompt, max_new_tokens, stop_ids)
        report.rounds += len(rounds)
        if response.tokens[0] != first.token and first.tie(response.tokens[0], report.epsilon):
            report.target_ties += 1
            report.uncompared += len(rounds)
            continue
        _compare(report, f"prompt {index}", response, rounds, tokens)
    return report


def _import_dflash() -> Any:
    try:
        return importlib.import_module("dflash.model")
    except ImportError as error:
        raise RuntimeError(
            f"the export check needs the dflash package ({error}): pip install --no-deps dflash==0.1.0"
        ) from None


def _load(package: Any, folder: Path | str, dtype: torch.dtype) -> Any:
    """Raises ValueError where the package would initialise a tensor or leave one out."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, info = package.DFlashDraftModel.from_pretrained(str(folder), dtype=dtype, output_loading_info=True)
    finally:
        if bars:
            logging.enable_progress_bar()
    if wrong := sorted(info["missing_keys"]) + sorted(info["unexpected_keys"]):
        raise ValueError(f"{folder}: dflash misses or does not know {len(wrong)} tensors, first {wrong[0]}")
    return model


def _generate(
    package: Any, model: Any, target: Any, prompt: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
) -> tuple[_Choice, list[_OracleRound], list[int]]:
    """The target's choice after the prompt, the rounds, the generated tokens."""
    with _recorded(model, target) as (drafted, verified), _host_clock(package):
        result = package.dflash_generate(
            model,
            target,
            torch.tensor([list(prompt)], device=next(target.parameters()).device),
            max_new_tokens,
            sorted(stop_ids),
            return_stats=True,
        )
    rounds, start = [], len(prompt)
    for produced, draft, verify in zip(result.acceptance_lengths, drafted, verified[1:], strict=True):
        rounds.append(_OracleRound(start, draft, verify, produced))
        start += produced
    return verified[0][-1], rounds, result.output_ids[0, len(prompt) :].tolist()


@contextmanager
def _recorded(model: Any, target: Any) -> Iterator[tuple[list[list[_Choice]], list[list[_Choice]]]]:
    """Collects the choices of each draft and of each target pass (the first is the prefill)."""
    drafted: list[list[_Choice]] = []
    verified: list[list[_Choice]] = []
    original = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Tensor:
        logits = original(*args, **kwargs)
        drafted.append(_choices(logits))
        return logits

    model.compute_logits = compute_logits  # shadows the method on this instance only
    hook = target.register_forward_hook(lambda _module, _inputs, output: verified.append(_choices(output.logits)))
    try:
        yield drafted, verified
    finally:
        hook.remove()
        del model.compute_logits


@contextmanager
def _host_clock(package: Any) -> Iterator[None]:
    """The package times with CUDA, even on a CPU; the statistics are only given with the time."""
    original = package._cuda_time
    package._cuda_time = time.perf_counter
    try:
        yield
    finally:
        package._cuda_time = original


def _choices(logits: Tensor) -> list[_Choice]:
    """[1, S, V] -> one per position. The token is argmax's, so that equal logits resolve as in the package."""
    best = logits[0].argmax(dim=-1)
    values, ids = logits[0].float().topk(2, dim=-1)
    seconds = torch.where(ids[:, 0] == best, ids[:, 1], ids[:, 0])
    gaps = values[:, 0] - values[:, 1]
    return [_Choice(*choice) for choice in zip(best.tolist(), seconds.tolist(), gaps.tolist(), strict=True)]


def _compare(
    report: OracleReport, where: str, ours: ResponseLike, theirs: list[_OracleRound], tokens: list[int]
) -> None:
    """Adds one prompt to the report. Stops at the first mismatch, and where a tie has parted the two."""
    offset = theirs[0].start - 1 if theirs else 0  # position of the token before the first generated one
    for index, (have, want) in enumerate(zip(ours.rounds, theirs, strict=False)):
        report.compared += 1
        place = f"{where}, round {index}"
        tied_slot = _compare_drafts(report, place, have, want)
        if tied_slot is None:
            return
        first, last = have.start - offset, have.start - offset + have.produced
        same_text = ours.tokens[first:last] == tuple(tokens[first : first + want.produced])
        if have.start == want.start and have.produced == want.produced and same_text:
            continue
        explained = 0 < tied_slot <= max(have.produced, want.produced)
        if not explained and not _target_tie(report, have, want, ours.tokens[first:last]):
            report.mismatches.append(
                f"{place}: start {have.start} and {have.produced} tokens {ours.tokens[first:last]}, dflash has "
                f"start {want.start} and {want.produced} tokens {tuple(tokens[first : first + want.produced])}"
            )
            return
        report.uncompared += len(theirs) - index - 1
        return
    if len(ours.rounds) != len(theirs) or list(ours.tokens) != tokens:
        report.mismatches.append(
            f"{where}: {len(ours.rounds)} rounds and {len(ours.tokens)} tokens, "
            f"dflash has {len(theirs)} rounds and {len(tokens)} tokens"
        )


def _compare_drafts(report: OracleReport, place: str, have: RoundLike, want: _OracleRound) -> int | None:
    """First slot drafted otherwise at a tie, 0 where there is none; None after a mismatch."""
    if len(have.drafted) != len(want.drafted):
        report.mismatches.append(f"{place}: drafted {len(have.drafted)} tokens, dflash {len(want.drafted)}")
        return None
    first = 0
    for slot, (token, choice) in enumerate(zip(have.drafted, want.drafted, strict=True), start=1):
        if token == choice.token:
            continue
        if not choice.tie(token, report.epsilon):
            report.mismatches.append(
                f"{place}, slot {slot}: drafted {token}, dflash {choice.token}, "
                f"ahead of {choice.second} by {choice.gap:.3g}"
            )
            return None
        report.draft_ties += 1
        first = first or slot
    return first


def _target_tie(report: OracleReport, have: RoundLike, want: _OracleRound, kept: tuple[int, ...]) -> bool:
    """Whether the first token kept otherwise is one about which the target was undecided."""
    for token, choice in zip(kept, want.verified, strict=False):
        if token != choice.token:
            if choice.tie(token, report.epsilon):
                report.target_ties += 1
                return have.start == want.start
            return False
    return False
