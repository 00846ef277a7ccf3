"""The life of a slot: free -> leased -> filled -> reading -> free. One pool per drafter.

                             leased -> quarantined -> free

A slot is leased before the work for it starts: no place, no work. Every change names the pack (`seq`) it
belongs to, so a late or repeated message can never touch another pack's slot. A leased slot whose content is no
longer wanted is quarantined: nobody gets it until its writer has answered or exited.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class SlotState(Enum):
    FREE = "free"
    LEASED = "leased"  # a target may write
    FILLED = "filled"  # complete, waiting for its turn
    READING = "reading"  # the drafter may read
    QUARANTINED = "quarantined"  # a target may still write, nobody will read


@dataclass(slots=True)
class _Place:
    state: SlotState = SlotState.FREE
    seq: int | None = None


class SlotPool:
    """Owns the states, not the memory. Raises RuntimeError on a transition that cannot be.

    `count` packs have places at a time. The `spare` places are for what must not wait behind them: a second
    lease of one of these packs, or the next pack while a place is quarantined.
    """

    def __init__(self, count: int, spare: int = 0) -> None:
        if count < 1 or spare < 0:
            raise ValueError(f"a pool needs at least one slot, got {count} and {spare} spare")
        self._count = count
        self._places = [_Place() for _ in range(count + spare)]

    def lease(self, seq: int) -> int | None:
        """A free slot for the new pack `seq`, or None while `count` packs have places or none is free."""
        wanted = {place.seq for place in self._places if place.state not in (SlotState.FREE, SlotState.QUARANTINED)}
        return self.lease_again(seq) if len(wanted) < self._count else None

    def lease_again(self, seq: int) -> int | None:
        """Any free slot, also a spare one, for a pack that is not new; None while none is free."""
        for slot, place in enumerate(self._places):
            if place.state is SlotState.FREE:
                place.state, place.seq = SlotState.LEASED, seq
                return slot
        return None

    def fill(self, slot: int, seq: int) -> None:
        self._move(slot, seq, SlotState.LEASED, SlotState.FILLED)

    def read(self, slot: int, seq: int) -> None:
        self._move(slot, seq, SlotState.FILLED, SlotState.READING)

    def free(self, slot: int, seq: int) -> None:
        """After the last read."""
        self._move(slot, seq, SlotState.READING, SlotState.FREE)

    def drop(self, slot: int, seq: int) -> None:
        """The writer gave up and has stopped writing."""
        self._move(slot, seq, SlotState.LEASED, SlotState.FREE)

    def quarantine(self, slot: int, seq: int) -> None:
        """The writer is not awaited any more, but may still be writing."""
        self._move(slot, seq, SlotState.LEASED, SlotState.QUARANTINED)

    def release(self, slot: int, seq: int) -> None:
        """The writer of a quarantined slot has answered or exited."""
        self._move(slot, seq, SlotState.QUARANTINED, SlotState.FREE)

    def number(self, state: SlotState) -> int:
        """How many slots are in `state`."""
        return sum(place.state is state for place in self._places)

    def state(self, slot: int) -> SlotState:
        return self._places[slot].state

    def _move(self, slot: int, seq: int, old: SlotState, new: SlotState) -> None:
        place = self._places[slot]
        if place.state is not old or place.seq != seq:
            raise RuntimeError(
                f"slot {slot}: {old.value} -> {new.value} for pack {seq}, "
                f"but it is {place.state.value} with pack {place.seq}"
            )
        place.state = new
        if new is SlotState.FREE:
            place.seq = None
