"""Acceptance from recorded rounds: tau, intervals, per-slot shares. numpy only.

The unit is a round's `produced`: accepted draft tokens + 1, the target's own token included. As in the
published benchmark (dflash 0.1.0) it is what the round added to the text, so a response's last round counts
less where the length limit or a stop token cut it. tau is the mean over responses of each response's mean.

A slot is scored where the text had room for it: slots past a stop token have no right answer and count
neither as tried nor as missed. Slot k = 1..B-1; slot 0 is the anchor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from draftmill.evaluate.responses import Response

RESAMPLES = 10_000
SEED = 0


@dataclass(frozen=True, slots=True)
class Acceptance:
    tau: float | None  # mean of per-response means; None where no response had a round
    tau_interval: tuple[float, float] | None  # bootstrap over responses, 95 %
    pooled: float | None  # mean over all rounds
    pooled_interval: tuple[float, float] | None
    slot_accepted: tuple[float | None, ...]  # slot k: rounds that accepted it / rounds that scored it
    slot_conditional: tuple[float | None, ...]  # the same among rounds that accepted all slots before it
    slot_scored: tuple[int, ...]  # rounds that scored slot k
    full_blocks: float | None  # share of complete blocks accepted whole
    histogram: tuple[int, ...]  # rounds by produced tokens, 0..B
    responses: int  # that had a round
    excluded: dict[str, int]  # responses without a round, by reason
    rounds: int
    tokens: int  # produced in rounds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    responses: Sequence[Response], block_size: int, *, resamples: int = RESAMPLES, seed: int = SEED
) -> Acceptance:
    excluded = Counter(
        "stopped at the first token" if response.finish == "stop" else "only one token was asked for"
        for response in responses
        if not response.rounds
    )
    used = [response for response in responses if response.rounds]
    sums = np.array([sum(r.produced for r in response.rounds) for response in used], dtype=np.float64)
    counts = np.array([len(response.rounds) for response in used], dtype=np.float64)
    produced = [r.produced for response in used for r in response.rounds]
    accepted, scored = _slots(used)
    ones = np.ones_like(counts)
    return Acceptance(
        tau=float(np.mean(sums / counts)) if used else None,
        tau_interval=bootstrap_interval(sums / counts, ones, resamples=resamples, seed=seed) if used else None,
        pooled=float(sums.sum() / counts.sum()) if used else None,
        pooled_interval=bootstrap_interval(sums, counts, resamples=resamples, seed=seed) if used else None,
        **_slot_shares(accepted, scored, block_size),
        histogram=tuple(np.bincount(np.array(produced, dtype=np.int64), minlength=block_size + 1).tolist()),
        responses=len(used),
        excluded=dict(excluded),
        rounds=len(produced),
        tokens=sum(produced),
    )


def bootstrap_interval(
    numerators: np.ndarray,
    denominators: np.ndarray,
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> tuple[float, float]:
    """Percentile interval of sum(numerators) / sum(denominators) when the pairs are drawn with replacement.

    With denominators of one it is the interval of a mean.
    """
    count = len(numerators)
    generator = np.random.default_rng(seed)
    ratios = np.empty(resamples)
    step = max(1, 4_000_000 // count)  # bounds the index matrix
    for first in range(0, resamples, step):
        chosen = generator.integers(0, count, size=(min(step, resamples - first), count))
        ratios[first : first + step] = numerators[chosen].sum(axis=1) / denominators[chosen].sum(axis=1)
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _slots(responses: Sequence[Response]) -> tuple[np.ndarray, np.ndarray]:
    """Per round: leading drafted tokens accepted, and slots scored (the text's end cuts both)."""
    accepted, scored = [], []
    for response in responses:
        for index, entry in enumerate(response.rounds):
            stopped = response.finish == "stop" and index == len(response.rounds) - 1
            room = min(len(entry.drafted), entry.produced) if stopped else len(entry.drafted)
            scored.append(room)
            accepted.append(min(entry.accepted, room))
    return np.array(accepted, dtype=np.int64), np.array(scored, dtype=np.int64)


def _slot_shares(accepted: np.ndarray, scored: np.ndarray, block_size: int) -> dict[str, Any]:
    slots = range(1, block_size)
    tried = [int((scored >= k).sum()) for k in slots]
    hits = [int((accepted >= k).sum()) for k in slots]
    reached = [int(((scored >= k) & (accepted >= k - 1)).sum()) for k in slots]
    return {
        "slot_accepted": tuple(_share(hit, of) for hit, of in zip(hits, tried, strict=True)),
        "slot_conditional": tuple(_share(hit, of) for hit, of in zip(hits, reached, strict=True)),
        "slot_scored": tuple(tried),
        "full_blocks": _share(hits[-1], tried[-1]),
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
