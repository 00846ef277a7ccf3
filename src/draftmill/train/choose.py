"""`train.step_mode: auto`: the fastest mode that proves itself equal to the eager one on the run's own packs.

Until the choice is made every step is eager; beside it a candidate does the same packs, and its gradients are compared
and thrown away. The drafters' votes ride in the gradient exchange, so all of them choose at the same step, without
waiting for one another. The choice is stored in the run folder; a restart never chooses anew.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftmill.drafter.objective import LossSums
from draftmill.train.gradients import FlatGradients
from draftmill.wire import Pack

log = logging.getLogger(__name__)

MicroStep = Callable[[Pack, Tensor], LossSums]

CHECKS = 3  # packs that a candidate is compared on, over all drafters
TOLERANCE = {
    "float32": 2e-3,
    "bfloat16": 5e-2,
}  # of the gradient's and the numerator's relative error, by compute dtype
FILE = "step-mode.json"


@dataclass(frozen=True, slots=True)
class Choice:
    """Which mode a run steps in, and why not a faster one."""

    mode: str
    why: str

    def write(self, run_dir: Path) -> None:
        aside = run_dir / f".{FILE}"
        aside.write_text(json.dumps(asdict(self)) + "\n")
        aside.replace(run_dir / FILE)

    @classmethod
    def read(cls, run_dir: Path) -> Choice | None:
        path = run_dir / FILE
        return cls(**json.loads(path.read_text())) if path.exists() else None


class ChoosingStep:
    """A micro-step that begins eager and goes on as the first of `candidates` that all drafters' checks pass.

    `candidates`: mode -> what makes its step, fastest first; made one at a time. `chosen` is told once.
    """

    def __init__(
        self,
        eager: MicroStep,
        candidates: Mapping[str, Callable[[], MicroStep]],
        gradients: FlatGradients,
        dtype: str,
        chosen: Callable[[Choice, MicroStep], None],
    ) -> None:
        self._eager, self._step = eager, eager
        self._left = list(candidates.items())
        self._gradients, self._tolerance, self._chosen = gradients, TOLERANCE[dtype], chosen
        self._reasons: list[str] = []
        self._own_reason: str | None = None  # what this drafter found wrong with the candidate
        self._deciding = True
        self._begin_candidate()

    def __call__(self, pack: Pack, features: Tensor) -> LossSums:
        if self._deciding:
            self._count_votes()
        if not self._deciding:
            return self._step(pack, features)
        return self._checked(pack, features)

    def _begin_candidate(self) -> None:
        self._candidate: MicroStep | None = None
        self._own_reason = None
        self._checks = self._failures = 0
        self._gradients.forget_votes()

    def _count_votes(self) -> None:
        """Of the last exchange; the one place where the host waits, and only until the choice is made."""
        checks, failures = (round(value) for value in self._gradients.votes())
        if checks < CHECKS and not failures:
            return
        mode, _ = self._left.pop(0)
        if not failures:
            assert self._candidate is not None
            self._decide(Choice(mode, "; ".join(self._reasons) or "equal to eager"), self._candidate)
        else:
            self._reasons.append(f"{mode}: {self._own_reason or 'another drafter found it unequal to eager'}")
            self._begin_candidate()
            if not self._left:
                self._decide(Choice("eager", "; ".join(self._reasons)), self._eager)

    def _decide(self, choice: Choice, step: MicroStep) -> None:
        self._step, self._deciding = step, False
        log.info("steps are %s (%s)", choice.mode, choice.why)
        self._chosen(choice, step)

    def _checked(self, pack: Pack, features: Tensor) -> LossSums:
        flat = self._gradients
        before, stale = (None, True) if flat.stale else (flat.gradient.clone(), False)
        sums = self._eager(pack, features)
        expected = flat.gradient.clone()
        flat.stale = stale
        if before is not None:
            flat.gradient.copy_(before)
        try:
            problem = self._compare(sums, expected, before, pack, features)
        except (RuntimeError, AssertionError, ValueError) as error:  # a compiler's or a capture's own
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        flat.gradient.copy_(expected)
        flat.stale = False
        self._checks += 1
        self._failures += problem is not None
        self._own_reason = self._own_reason or problem
        flat.vote(self._checks, self._failures)
        return sums

    def _compare(
        self, sums: LossSums, expected: Tensor, before: Tensor | None, pack: Pack, features: Tensor
    ) -> str | None:
        """What is wrong with the candidate on this pack."""
        if self._candidate is None:
            self._candidate = self._left[0][1]()
        found = self._candidate(pack, features)
        ours = self._gradients.gradient if before is None else self._gradients.gradient - before
        theirs = expected if before is None else expected - before
        errors = {
            "gradient": relative_error(ours, theirs),
            "loss": relative_error(found.numerator, sums.numerator),
            "weights": relative_error(found.denominator, sums.denominator),
        }
        wrong = {name: error for name, error in errors.items() if not error <= self._tolerance}  # nan is wrong, too
        if not wrong:
            return None
        listed = ", ".join(f"{name} off by {error:.2g}" for name, error in wrong.items())
        return f"pack {pack.seq}: {listed}, at most {self._tolerance:g} is allowed"


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach(), theirs.detach()
    norm = torch.linalg.vector_norm(theirs)
    return float(torch.linalg.vector_norm(ours - theirs) / torch.where(norm > 0, norm, 1.0))
