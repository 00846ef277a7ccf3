"""Small packs, and the pipeline in simulated time: targets and drafters that only take as long as they are told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from draftmill.run.actions import Assign, Deliver
from draftmill.run.planner import Planner
from draftmill.wire import DocumentSpan, Pack


def make_pack(seq: int, documents: list[int], epoch: int = 0) -> Pack:
    """Document d has 1 + d mod 3 tokens, all of them d."""
    spans, token_ids = [], []
    for document in documents:
        length = 1 + document % 3
        spans.append(DocumentSpan(document, len(token_ids), length, anchors=1))
        token_ids += [document] * length
    return Pack(seq, epoch, tuple(spans), np.array(token_ids, dtype=np.int32), np.ones(len(token_ids), dtype=bool))


def make_packs(count: int, each: int = 2, first: int = 0) -> Iterator[Pack]:
    """Packs first ... first + count - 1 of `each` documents, without epochs."""
    return (make_pack(seq, list(range(each * seq, each * (seq + 1)))) for seq in range(first, first + count))


def rows(pack: Pack) -> tuple[int, ...]:
    return tuple(span.document for span in pack.documents)


class Simulation:
    """Runs a planner to its end. Messages take no time; a drafter reads one pack at a time."""

    def __init__(
        self,
        planner: Planner,
        targets: int,
        service: Callable[[int, int], float],  # (target, seq) -> seconds
        read: Callable[[int], float],  # seq -> seconds
        drafters: int = 1,
    ) -> None:
        self.planner, self.service, self.read = planner, service, read
        self.now = 0.0
        self.by_working: dict[int, float] = {}  # targets at work -> seconds
        self.leases_of = [0] * targets
        self._events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self._order = 0
        self._working = 0
        self._lines: list[deque[tuple[int, int]]] = [deque() for _ in range(drafters)]
        self._reading = [False] * drafters
        for target in range(targets):
            planner.target_ready(target)
        self._act()

    def run(self) -> float:
        """Seconds until the last pack is freed."""
        while not self.planner.finished:
            self.step()
        return self.now

    def step(self) -> None:
        """One event further."""
        assert self._events, "nothing will ever happen again"
        time, _, kind, values = heappop(self._events)
        self.by_working[self._working] = self.by_working.get(self._working, 0.0) + time - self.now
        self.now = time
        if kind == "filled":
            self._working -= 1
            self.planner.filled(*values, now=time)
        elif kind == "freed":
            self._reading[values[0]] = False
            self.planner.freed(*values)
        self._act()

    def _act(self) -> None:
        for action in self.planner.actions(self.now):
            if isinstance(action, Assign):
                self.leases_of[action.target] += 1
                self._working += 1
                seconds = self.service(action.target, action.lease.pack.seq)
                self._after(seconds, "filled", action.target, action.lease.lease)
            elif isinstance(action, Deliver) and action.slot is not None:
                self._lines[action.drafter].append((action.seq, action.slot))
        for drafter, line in enumerate(self._lines):
            if line and not self._reading[drafter]:
                self._reading[drafter] = True
                seq, slot = line.popleft()
                self._after(self.read(seq), "freed", drafter, seq, slot)
        deadline = self.planner.next_deadline(self.now)
        if deadline is not None:
            self._at(deadline, "deadline")

    def _after(self, seconds: float, kind: str, *values: int) -> None:
        self._at(self.now + seconds, kind, *values)

    def _at(self, time: float, kind: str, *values: int) -> None:
        self._order += 1
        heappush(self._events, (time, self._order, kind, values))


def bound(
    packs: int, targets: int, slots: int, service: Callable[[int], float], read: Callable[[int], float], drafters: int
) -> float:
    """When the last pack is freed if each is computed once: no planner, only what must precede what.

    A pack starts after its predecessor started, when a target is idle and the pack `slots` before it in its own
    drafter's line is freed; it is read after it is filled and the one before it is read.
    """
    idle = [0.0] * targets
    heapify(idle)
    started = 0.0
    freed: list[float] = []
    for seq in range(packs):
        place = freed[seq - drafters * slots] if seq >= drafters * slots else 0.0
        started = max(started, idle[0], place)
        filled = started + service(seq)
        heapreplace(idle, filled)
        freed.append(max(filled, freed[seq - drafters] if seq >= drafters else 0.0) + read(seq))
    return max(freed)
