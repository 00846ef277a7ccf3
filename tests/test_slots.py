"""The life of a slot, and the memory behind it."""

import pytest
import torch

from draftmill.slots.memory import LocalSlots, SharedSlots, SlotLayout
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


def test_spare_places_are_not_for_new_packs():
    pool = SlotPool(1, spare=1)
    assert pool.lease(7) == 0 and pool.lease(8) is None
    assert pool.lease_again(7) == 1 and pool.lease_again(7) is None
    assert pool.number(SlotState.LEASED) == 2


def test_a_quarantined_slot_is_nobodys_until_it_is_released():
    pool = SlotPool(1, spare=1)
    assert (pool.lease(7), pool.lease_again(7)) == (0, 1)
    pool.fill(1, 7)
    pool.quarantine(0, 7)
    pool.read(1, 7)
    assert pool.lease(8) is None  # pack 7 is still there
    pool.free(1, 7)
    assert pool.lease(8) == 1 and pool.lease_again(8) is None  # the spare place stands in
    pool.release(0, 7)
    assert pool.lease(9) is None and pool.lease_again(8) == 0


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
        (["lease", "fill"], ("quarantine", 0, 5)),
        (["lease"], ("release", 0, 5)),
        (["lease", "quarantine"], ("fill", 0, 5)),  # late, and not wanted any more
        (["lease", "quarantine"], ("release", 0, 6)),
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


def local(layout):
    return LocalSlots(layout, torch.device("cpu"))


@pytest.mark.parametrize("make", [local, SharedSlots.create])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_memory_keeps_slots_apart_and_refuses_what_does_not_fit(make, dtype):
    """Case 80: a pack larger than its slot is an error, never a cut."""
    layout = SlotLayout(2, capacity=5, feature_size=3, dtype=dtype)
    memory = make(layout)
    assert not memory.read(0, 5).any()
    memory.write(0, torch.full((5, 3), 1.0, dtype=layout.torch_dtype))
    memory.write(1, torch.full((2, 3), 2.0, dtype=layout.torch_dtype))
    assert memory.read(0, 5).eq(1).all() and memory.read(1, 2).eq(2).all() and not memory.read(1, 5)[2:].any()
    assert memory.read(0, 4).shape == (4, 3) and memory.read(0, 4).dtype is layout.torch_dtype
    for shape in ((6, 3), (5, 4), (5,)):
        with pytest.raises(ValueError, match="do not fit"):
            memory.write(0, torch.zeros(shape, dtype=layout.torch_dtype))
    with pytest.raises(ValueError, match=r"torch\.float64 do not fit"):
        memory.write(0, torch.zeros(5, 3, dtype=torch.float64))
    for slot, tokens in ((-1, 1), (2, 1), (0, 6)):
        with pytest.raises(ValueError, match="is outside"):
            memory.read(slot, tokens)
    with pytest.raises(ValueError, match="is outside"):
        memory.write(2, torch.zeros(1, 3, dtype=layout.torch_dtype))
    if isinstance(memory, SharedSlots):
        memory.close()
