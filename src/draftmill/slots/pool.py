"""The life of a slot: free -> leased -> filled -> reading -> free. One pool per drafter.

A slot is leased before the work for it starts: no place, no work. Every change names the pack (`seq`) it
belongs to, so a late or repeated message can never touch another pack's slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class SlotState(Enum):
    FREE = "free"
    LEASED = "leased"  # a target may write
    FILLED = "filled"  # complete, waiting for its turn
    READING = "reading"  # the drafter may read


@dataclass(slots=True)
class _Place:
    state: SlotState = SlotState.FREE
    seq: int | None = None


class SlotPool:
    """Owns the states, not the memory. Raises RuntimeError on a transition that cannot be."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"a pool needs at least one slot, got {count}")
        self._places = [_Place() for _ in range(count)]

    def lease(self, seq: int) -> int | None:
        """A free slot for pack `seq`, or None while all are taken."""
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
