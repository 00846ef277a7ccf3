"""Who works on which pack, and in which place: leases, hedges, deliveries, and what is left out after faults.

    packs --lease, in seq order--> target --filled--> delivery, in order per drafter --freed--> place
              ^------- gone, or rejected documents --------'

A state machine without IO and without a clock: events go in, `actions` says what is to be done now. Always holds:

- Pack `seq` belongs to drafter `seq mod M`, which gets its packs in order and without gaps, each once.
- New packs are leased in seq order; a pack whose lease came back goes before all new ones.
- A drafter's packs in hand, from the first lease until freed, are at most `slots`. One more pack is read ahead.
- At most two targets work on a pack. The first fill wins; the other's place is quarantined until it answers or exits.
- A document leaves its pack only by a decision (`Removed`), which precedes the delivery of the pack. The same
  decisions given at construction leave the same packs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from draftmill.run.actions import Action, Assign, Counts, Deliver, Removed
from draftmill.run.pace import Pace
from draftmill.slots.pool import SlotPool, SlotState
from draftmill.wire import Lease, Pack, without

KILLED_TARGET = "killed_target"
SPARE = 1  # places per drafter beyond `slots`
POISON = 2  # a pack that has killed so many targets is computed one document at a time


@dataclass(slots=True)
class _Work:
    """The one lease a target has."""

    lease: Lease
    started: float
    wanted: bool = True  # False: the pack is filled or changed, the answer only frees the place
    hedge: bool = False
    done: int = 0  # documents, where they are computed one by one


@dataclass(slots=True)
class _Held:
    """A pack in hand."""

    seq: int
    pack: Pack | None  # None: no document is left
    kills: int = 0
    writers: list[int] = field(default_factory=list)  # targets whose answer is wanted
    slot: int | None = None  # where it is complete
    delivered: bool = False


class Planner:
    """One run of packs from one position. After a drafter's restart a new one is made; `first_lease` keeps ids unique.

    `packs` come in seq order and may end; one without documents is a zero-weight micro-step from the start.
    `removed`: earlier decisions, documents to leave out by seq.
    """

    def __init__(
        self,
        packs: Iterator[Pack],
        drafters: int,
        slots: int,
        hedge_factor: float = 3.0,
        removed: Mapping[int, Collection[int]] | None = None,
        first_lease: int = 0,
    ) -> None:
        if drafters < 1 or hedge_factor <= 1:
            raise ValueError(f"drafters {drafters} must be at least 1 and hedge_factor {hedge_factor} above 1")
        self._packs: Iterator[Pack] | None = packs  # None after the last
        self._ahead: _Held | None = None  # the next pack to lease
        self._newest_seq: int | None = None
        self._slots = slots
        self._pools = [SlotPool(slots, SPARE) for _ in range(drafters)]
        self._removed = removed or {}
        self._pace = Pace(hedge_factor, drafters * slots)
        self._targets: dict[int, _Work | None] = {}  # those idle: the longest idle first
        self._held: dict[int, _Held] = {}
        self._again: list[int] = []  # heap: held packs without a writer
        self._lines: list[deque[_Held]] = [deque() for _ in range(drafters)]  # held packs not yet delivered
        self._in_hand = [0] * drafters
        self._out: list[Action] = []
        self._next_lease = first_lease
        self._leases = self._hedges = self._hedges_won = self._requeues = self._stale = 0

    # Events

    def target_ready(self, target: int) -> None:
        """It has started, or has put away work that was none of this planner's."""
        if target in self._targets:
            raise RuntimeError(f"target {target} is known already, it cannot become ready")
        self._targets[target] = None

    def target_gone(self, target: int) -> None:
        """After its exit and its last message: it writes no more. One that was never ready is none of ours."""
        work = self._targets.pop(target, None)
        self._pace.forget(target)
        if work is None:
            return
        held = self._end(target, work)
        if held is None:
            return
        held.kills += 1
        if work.lease.one_by_one:
            documents = [span.document for span in work.lease.pack.documents]
            # The first one not done is guilty. If each could be computed alone, the pack as a whole is.
            self._remove(held, documents[work.done : work.done + 1] or documents, KILLED_TARGET)
        self._requeue(held)

    def filled(self, target: int, lease: int, now: float) -> None:
        work = self._find(target, lease)
        if work is None:
            return
        self._idle_again(target, work, now)
        seq, slot = work.lease.pack.seq, work.lease.slot
        if not work.wanted:
            self._pool(seq).release(slot, seq)
            return
        held = self._held[seq]
        self._pool(seq).fill(slot, seq)
        held.slot = slot
        held.writers.remove(target)
        if held.writers:
            self._pace.hedged(won=work.hedge)
            self._hedges_won += work.hedge
            self._disown_writers(held)

    def rejected(self, target: int, lease: int, documents: Collection[int], reason: str, now: float) -> None:
        """`documents` (dataset rows) cannot be used; the place is not written any more."""
        work = self._find(target, lease)
        if work is None:
            return
        pack = work.lease.pack
        if not documents or set(documents) - {span.document for span in pack.documents}:
            raise RuntimeError(f"target {target} rejects documents {sorted(documents)} of pack {pack.seq}")
        self._idle_again(target, work, now)
        held = self._end(target, work)
        if held is not None:
            self._remove(held, documents, reason)
            self._requeue(held)

    def document_done(self, target: int, lease: int, index: int) -> None:
        """Document `index` of a pack leased one by one has been computed."""
        work = self._find(target, lease)
        if work is None:
            return
        pack = work.lease.pack
        if not work.lease.one_by_one or index != work.done or index >= len(pack.documents):
            raise RuntimeError(f"target {target}: document {index} of pack {pack.seq} is done, after {work.done}")
        work.done += 1

    def freed(self, drafter: int, seq: int, slot: int) -> None:
        """The drafter's last read of `slot` is over."""
        if seq % len(self._pools) != drafter:
            raise RuntimeError(f"drafter {drafter} frees pack {seq}, which is not its own")
        self._pools[drafter].free(slot, seq)
        del self._held[seq]
        self._in_hand[drafter] -= 1

    # What is to be done

    def actions(self, now: float) -> list[Action]:
        """Everything that can be done now, in order. Each is given out once."""
        while self._deliver() or self._lease(now):
            pass
        out, self._out = self._out, []
        return out

    def next_deadline(self, now: float) -> float | None:
        """When `actions` may have something new without an event; None: not before the next event."""
        idle = [target for target, work in self._targets.items() if work is None]
        if not idle:
            return None
        times = [self._pace.rests_until(target) for target in idle]
        times += [self._due(work) for work in self._targets.values() if work is not None]
        return min((time for time in times if now < time < math.inf), default=None)

    @property
    def finished(self) -> bool:
        """All packs are delivered and freed. Late targets may still be writing."""
        return self._packs is None and self._ahead is None and not self._held and not self._out

    @property
    def next_lease(self) -> int:
        """The first lease id not yet used."""
        return self._next_lease

    def lease_of(self, target: int) -> tuple[Lease, float] | None:
        """What `target` works on, wanted or not, and since when."""
        work = self._targets.get(target)
        return None if work is None else (work.lease, work.started)

    def counts(self) -> Counts:
        works = [work for work in self._targets.values() if work is not None]
        working = sum(work.wanted for work in works)
        return Counts(
            idle=len(self._targets) - len(works),
            working=working,
            late=len(works) - working,
            held=len(self._held),
            ready=sum(pool.number(SlotState.FILLED) for pool in self._pools),
            leases=self._leases,
            hedges=self._hedges,
            hedges_won=self._hedges_won,
            requeues=self._requeues,
            stale=self._stale,
        )

    # Packs

    def _look_ahead(self) -> _Held | None:
        """The next pack to lease, without what was removed from it earlier."""
        if self._ahead is None and self._packs is not None:
            pack = next(self._packs, None)
            if pack is None:
                self._packs = None
                return None
            if self._newest_seq is not None and pack.seq != self._newest_seq + 1:
                raise RuntimeError(f"pack {pack.seq} follows pack {self._newest_seq}")
            self._newest_seq = pack.seq
            left = without(pack, self._removed.get(pack.seq, ()))  # None also for one that came without documents
            self._ahead = _Held(pack.seq, left)
        return self._ahead

    def _take_in(self, held: _Held) -> None:
        drafter = held.seq % len(self._pools)
        self._ahead = None
        self._held[held.seq] = held
        self._lines[drafter].append(held)
        self._in_hand[drafter] += 1

    def _remove(self, held: _Held, documents: Collection[int], reason: str) -> None:
        pack = held.pack
        assert pack is not None
        gone = tuple(span.document for span in pack.documents if span.document in documents)
        self._out.append(Removed(pack.seq, pack.epoch, gone, reason))
        held.pack = without(pack, frozenset(gone))
        self._disown_writers(held)  # they compute what is not wanted any more

    def _requeue(self, held: _Held) -> None:
        if held.pack is not None and not held.writers:
            heappush(self._again, held.seq)
            self._requeues += 1

    def _deliver(self) -> bool:
        """Give out what has its turn. True if there was any."""
        any_given = False
        for drafter, line in enumerate(self._lines):
            while line and (line[0].slot is not None or line[0].pack is None):
                held = line.popleft()
                self._out.append(Deliver(drafter, held.seq, held.pack, held.slot))
                any_given = True
                if held.slot is not None:
                    self._pools[drafter].read(held.slot, held.seq)
                else:
                    del self._held[held.seq]
                    self._in_hand[drafter] -= 1
        return any_given

    # Leases

    def _lease(self, now: float) -> bool:
        """Take one pack further: a lease that came back, then a new pack, then a hedge. False: nothing can be done."""
        target = self._available(now)
        if self._again:
            if target is None or not self._assign(target, self._held[self._again[0]], now):
                return False  # nothing overtakes it
            heappop(self._again)
            return True
        return self._lease_new(target, now) or (target is not None and self._hedge(target, now))

    def _lease_new(self, target: int | None, now: float) -> bool:
        held = self._look_ahead()
        if held is None:
            return False
        drafter = held.seq % len(self._pools)
        if self._in_hand[drafter] == self._slots:
            return False
        if held.pack is not None:
            line, pool = self._lines[drafter], self._pools[drafter]
            if target is None or (pool.number(SlotState.FREE) == 1 and line and self._overdue(line[0], now)):
                return False  # the last place is for the pack that holds the line
            if not self._assign(target, held, now):
                return False
        self._take_in(held)
        return True

    def _hedge(self, target: int, now: float) -> bool:
        """Lease again what holds a line and is overdue, the lowest seq first."""
        for held in sorted((line[0] for line in self._lines if line), key=lambda held: held.seq):
            if self._overdue(held, now) and self._assign(target, held, now):
                self._hedges += 1
                return True
        return False

    def _assign(self, target: int, held: _Held, now: float) -> bool:
        """False: no place is free."""
        assert held.pack is not None
        pool = self._pool(held.seq)
        slot = pool.lease_again(held.seq) if held.seq in self._held else pool.lease(held.seq)
        if slot is None:
            return False
        drafter = held.seq % len(self._pools)
        lease = Lease(self._next_lease, drafter, slot, held.pack, one_by_one=held.kills >= POISON)
        self._next_lease += 1
        self._leases += 1
        self._targets[target] = _Work(lease, now, hedge=bool(held.writers))
        held.writers.append(target)
        self._out.append(Assign(target, lease))
        return True

    def _available(self, now: float) -> int | None:
        """The target that has been idle longest. One that rests works only where no other one gets on."""
        idle = [target for target, work in self._targets.items() if work is None]
        fresh = [target for target in idle if self._pace.rests_until(target) <= now]
        if fresh or not idle:
            return fresh[0] if fresh else None
        busy = [work for work in self._targets.values() if work is not None]
        return None if any(now < self._due(work) for work in busy) else idle[0]

    def _overdue(self, held: _Held, now: float) -> bool:
        """May be leased a second time. A pack under suspicion is not: it would take two targets with it."""
        if len(held.writers) != 1 or held.kills >= POISON:
            return False
        work = self._targets[held.writers[0]]
        return work is not None and self._due(work) <= now

    def _due(self, work: _Work) -> float:
        return work.started + self._pace.overdue_after()

    # Answers

    def _find(self, target: int, lease: int) -> _Work | None:
        """What this answer is about; None for a stale one."""
        work = self._targets.get(target)
        if work is not None and work.lease.lease == lease:
            return work
        self._stale += 1
        return None

    def _idle_again(self, target: int, work: _Work, now: float) -> None:
        del self._targets[target]
        self._targets[target] = None  # now the last of the idle
        if not work.lease.one_by_one:
            self._pace.answered(target, now - work.started, now, peers=len(self._targets) - 1)

    def _end(self, target: int, work: _Work) -> _Held | None:
        """Work that ends without a fill: its place is free. Its pack, if it was wanted."""
        seq, slot = work.lease.pack.seq, work.lease.slot
        if not work.wanted:
            self._pool(seq).release(slot, seq)
            return None
        self._pool(seq).drop(slot, seq)
        held = self._held[seq]
        held.writers.remove(target)
        return held

    def _disown_writers(self, held: _Held) -> None:
        for writer in held.writers:
            work = self._targets[writer]
            assert work is not None
            work.wanted = False
            self._pool(held.seq).quarantine(work.lease.slot, held.seq)
        held.writers.clear()

    def _pool(self, seq: int) -> SlotPool:
        return self._pools[seq % len(self._pools)]
