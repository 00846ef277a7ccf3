"""What the loop asks of whoever brings filled packs. `run` provides it; the loop does not know from where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from draftmill.wire import Pack


class FeedStopped(Exception):
    """No further optimizer step is to begin. Raised by `Feed.next` before a step's first pack, never inside one."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class FilledPack:
    pack: Pack
    slot: int
    features: Tensor  # [T, F], valid until the pack is freed


class Feed(Protocol):
    """Packs of this drafter in `seq` order: exactly one answer per micro-step."""

    def next(self) -> FilledPack | None:
        """The next micro-step's pack, or None for a micro-step of zero weight (its pack failed, or data ended)."""

    def free(self, filled: FilledPack) -> None:
        """The last read of `filled.features` is over; its slot may be written again."""
