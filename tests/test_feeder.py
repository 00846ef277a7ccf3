"""The feeder: the stream's packs in its order, a bounded number of them ahead, and its errors at their place."""

import threading
import time

import pytest

from draftmill.run.feeder import Feeder
from planner_helpers import make_packs


class Counted:
    """Packs, and how many of them have been taken."""

    def __init__(self, count, fail_at=None):
        self.taken, self._packs, self._fail_at = 0, make_packs(count), fail_at

    def __iter__(self):
        return self

    def __next__(self):
        if self.taken == self._fail_at:
            raise OSError("the dataset's disk is gone")
        pack = next(self._packs)
        self.taken += 1
        return pack


def test_gives_every_pack_in_order_and_then_ends():
    feeder = Feeder(Counted(50), ahead=3)
    assert [pack.seq for pack in feeder] == list(range(50))
    with pytest.raises(StopIteration):
        next(feeder)
    feeder.close()


def test_reads_ahead_as_far_as_it_may_and_no_further():
    packs = Counted(50)
    feeder = Feeder(packs, ahead=3)
    for given in range(10):
        deadline = time.monotonic() + 30
        while packs.taken < given + 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.005)
        assert packs.taken == given + 4  # three are ready, the next is in the thread's hand
        assert next(feeder).seq == given
    feeder.close()
    assert not feeder._thread.is_alive()


def test_an_error_comes_after_the_packs_before_it():
    feeder = Feeder(Counted(50, fail_at=5), ahead=8)
    assert [next(feeder).seq for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(OSError, match="disk is gone"):
        next(feeder)
    feeder.close()


def test_close_ends_a_thread_that_waits_for_room():
    threads = threading.active_count()
    feeder = Feeder(Counted(50), ahead=1)
    feeder.close()
    assert threading.active_count() == threads
