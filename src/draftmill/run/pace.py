"""How long targets take, and what follows from it: when a lease is overdue, and which target rests.

A straggler is a target that answers so late that its peers would have filled every place meanwhile and waited for
it. After a few such answers in a row it rests, each time longer, so that it costs its peers little and is still
found out when it recovers. Nothing here touches the result, only who computes it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

RECENT = 32  # service times that the median is taken over
ENOUGH = 5  # service times before anything is judged
PATIENCE = 3  # late answers in a row before the first rest
DOUBLINGS = 5  # of the first rest, which lasts as long as the last service time
CAUTION = 1.5  # by how much one hedge that was for nothing delays the next
MOST_CAUTION = 16.0


@dataclass(slots=True)
class _Record:
    late: int = 0  # late answers in a row
    rests_until: float = -math.inf


class Pace:
    """Owns the service times of all targets. `places`: packs that may be held at once."""

    def __init__(self, hedge_factor: float, places: int) -> None:
        self._factor, self._places = hedge_factor, places
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._typical = math.inf  # their median
        self._caution = 1.0
        self._records: dict[int, _Record] = {}  # of targets that were late

    def overdue_after(self) -> float:
        """A lease older than this is overdue."""
        return self._factor * self._caution * self._typical

    def hedged(self, won: bool) -> None:
        """How a hedge ended. Where slowness is in the packs and not in the targets, none is ever won."""
        self._caution = max(1.0, self._caution / CAUTION) if won else min(self._caution * CAUTION, MOST_CAUTION)

    def answered(self, target: int, seconds: float, now: float, peers: int) -> None:
        """`target` took `seconds` for a pack, beside `peers` other targets."""
        late_after = self._typical * max(self._factor, self._places / peers) if peers else math.inf
        self._recent.append(seconds)
        if len(self._recent) >= ENOUGH:
            self._typical = median(self._recent)
        if seconds <= late_after:
            self.forget(target)
            return
        record = self._records.setdefault(target, _Record())
        record.late += 1
        if record.late >= PATIENCE:
            record.rests_until = now + seconds * 2 ** min(record.late - PATIENCE, DOUBLINGS)

    def rests_until(self, target: int) -> float:
        record = self._records.get(target)
        return record.rests_until if record else -math.inf

    def forget(self, target: int) -> None:
        """It is in time again, or gone: whoever comes under its number starts afresh."""
        self._records.pop(target, None)
