"""What the planner wants done, and the numbers it shows. The supervisor carries the actions out in order."""

from __future__ import annotations

from dataclasses import dataclass

from draftmill.wire import Lease, Pack


@dataclass(frozen=True, slots=True)
class Assign:
    """Send `lease` to `target`."""

    target: int
    lease: Lease


@dataclass(frozen=True, slots=True)
class Deliver:
    """Pack `seq` is complete in `slot`. No pack and no slot: a micro-step of zero weight, which is not freed."""

    drafter: int
    seq: int
    pack: Pack | None
    slot: int | None


@dataclass(frozen=True, slots=True)
class Removed:
    """These documents (dataset rows) of pack `seq` fail. To be stored before anything that follows it is done."""

    seq: int
    epoch: int
    documents: tuple[int, ...]
    reason: str


Action = Assign | Deliver | Removed


@dataclass(frozen=True, slots=True)
class Counts:
    """The planner at a moment, and what it has done so far."""

    idle: int  # targets without work
    working: int  # targets whose answer is awaited
    late: int  # targets whose answer is not awaited any more
    held: int  # packs in hand, of drafters x slots
    ready: int  # of these, filled and waiting for their turn
    leases: int  # all so far, hedges and repeats included
    hedges: int
    hedges_won: int
    requeues: int
    stale: int  # answers to no lease of this planner
