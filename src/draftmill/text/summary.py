"""What became of every input row of a `draftmill prepare`. Always: rows_in == kept + the sum of `dropped`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

from draftmill.text.chunks import Made
from draftmill.text.mask_token import MaskToken
from draftmill.text.refusals import DropReason, Refused

EXAMPLES_PER_REASON = 3


@dataclass(slots=True)
class Summary:
    rows_in: int = 0
    kept: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)
    examples: dict[DropReason, list[str]] = field(default_factory=dict)
    turns_dropped: int = 0  # rows without an anchor beside a kept row of the same conversation
    truncated: int = 0  # written rows that max_length cut
    raws: int = 0  # input rows read, blank lines counted: where the next one starts
    rows_out: int = 0  # token rows written: several per conversation where turns do not extend one another
    tokens: int = 0
    supervised_tokens: int = 0
    resumed_at: int = 0  # input rows that an interrupted attempt had finished
    mask_token: MaskToken | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def dropped_share(self) -> float:
        return sum(self.dropped.values()) / self.rows_in if self.rows_in else 0.0

    def enter(self, made: Made) -> None:
        self.raws += made.raws
        self.rows_in += made.kept
        self.kept += made.kept
        self.truncated += made.truncated
        self.turns_dropped += made.turns_dropped
        for refused in made.refused:
            self._drop(refused)

    def state(self) -> dict[str, Any]:
        """The counts of input rows as JSON values."""
        return {
            "rows_in": self.rows_in,
            "kept": self.kept,
            "dropped": {str(reason): count for reason, count in sorted(self.dropped.items())},
            "turns_dropped": self.turns_dropped,
            "truncated": self.truncated,
            "examples": {str(reason): shown for reason, shown in self.examples.items()},
            "raws": self.raws,
        }

    @classmethod
    def restored(cls, state: dict[str, Any] | None) -> Self:
        """None is a fresh start."""
        if state is None:
            return cls()
        dropped = Counter({DropReason(reason): count for reason, count in state["dropped"].items()})
        examples = {DropReason(reason): shown for reason, shown in state["examples"].items()}
        return cls(**{**state, "dropped": dropped, "examples": examples}, resumed_at=state["rows_in"])

    def table(self) -> str:
        lines = [f"{self.rows_in:>10,}  input rows", f"{self.kept:>10,}  kept"]
        for reason, count in self.dropped.most_common():
            lines.append(f"{count:>10,}  {reason}: {reason.explanation}; first: {', '.join(self.examples[reason])}")
        lines.append(
            f"{self.rows_out:>10,}  rows written with {self.tokens:,} tokens, {self.supervised_tokens:,} supervised; "
            f"{self.truncated:,} cut, {self.turns_dropped:,} further turns without an anchor"
        )
        return "\n".join(lines)

    def _drop(self, refused: Refused) -> None:
        self.rows_in += 1
        self.dropped[refused.reason] += 1
        shown = self.examples.setdefault(refused.reason, [])
        if len(shown) < EXAMPLES_PER_REASON:
            shown.append(f"{refused.source}" + (f" ({refused.detail})" if refused.detail else ""))


class PrepareError(ValueError):
    """The data were read, but are not good enough. The message holds the summary; nothing was written."""

    def __init__(self, problem: str, summary: Summary) -> None:
        super().__init__(f"{summary.table()}\n{problem}")
        self.summary = summary


@dataclass(frozen=True, slots=True)
class Progress:
    done_bytes: int
    total_bytes: int
    kept: int
    dropped: int
