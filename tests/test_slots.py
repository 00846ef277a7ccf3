"""The life of a slot, and the memory behind it."""

import pytest
import torch

from draftmill.slots.memory import LocalSlots
from draftmill.slots.pool import SlotPool, SlotState


def test_a_slot_goes_round():
    pool = SlotPool(2)
    assert pool.lease(7) == 0 and pool.lease(8) == 1
    assert pool.lease(9) is None  # no place, no work
    pool.fill(1, 8)
    pool.read(1, 8)
    pool.free(1, 8)
    assert pool.lease(9) == 1
    pool.drop(0, 7)
    assert pool.state(0) is SlotState.FREE and pool.state(1) is SlotState.LEASED


@pytest.mark.parametrize(
    ("done", "wrong"),
    [
        ([], ("fill", 0, 5)),  # never leased
        (["lease"], ("fill", 0, 6)),  # a late message about another pack
        (["lease"], ("read", 0, 5)),  # read before it is complete
        (["lease", "fill"], ("fill", 0, 5)),
        (["lease", "fill"], ("drop", 0, 5)),
        (["lease", "fill"], ("free", 0, 5)),
        (["lease", "fill", "read"], ("fill", 0, 5)),  # written while read
    ],
)
def test_transitions_that_cannot_be_are_refused(done, wrong):
    """Case 64's kind: no message can touch a slot out of turn."""
    pool = SlotPool(1)
    for step in done:
        pool.lease(5) if step == "lease" else getattr(pool, step)(0, 5)
    before = pool.state(0)
    name, slot, seq = wrong
    with pytest.raises(RuntimeError, match=f"slot 0: .* for pack {seq}"):
        getattr(pool, name)(slot, seq)
    assert pool.state(0) is before


def test_memory_keeps_slots_apart_and_refuses_what_does_not_fit():
    """Case 80: a pack larger than its slot is an error, never a cut."""
    memory = LocalSlots(2, capacity=5, feature_size=3, dtype=torch.float32, device=torch.device("cpu"))
    assert not memory.read(0, 5).any()
    memory.write(0, torch.full((5, 3), 1.0))
    memory.write(1, torch.full((2, 3), 2.0))
    assert memory.read(0, 5).eq(1).all() and memory.read(1, 2).eq(2).all() and not memory.read(1, 5)[2:].any()
    for shape in ((6, 3), (5, 4), (5,)):
        with pytest.raises(ValueError, match="do not fit"):
            memory.write(0, torch.zeros(shape))
