"""Slots shared by two real processes: no element is ever another pack's, and nothing outlives the processes."""

import gc
import json
import mmap
import os
import selectors
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from draftmill.run.channel import Channel, socketpair
from draftmill.slots.memory import SharedSlots, SlotLayout
from draftmill.slots.pool import SlotPool
from draftmill.wire import (
    CloseSlots,
    Deliver,
    DocumentSpan,
    Failed,
    Filled,
    Freed,
    Lease,
    OpenSlots,
    Pack,
    Phase,
    SlotsClosed,
    SlotsOffered,
)

PEERS = Path(__file__).parent / "slot_peers.py"
SMALL = SlotLayout(2, capacity=24, feature_size=40, dtype="float32")
LARGE = SlotLayout(2, capacity=2048, feature_size=8192, dtype="float32")  # 128 MiB


class Peer:
    def __init__(self, role, *arguments):
        ours, theirs = socketpair()
        with theirs:
            command = [sys.executable, str(PEERS), role, str(theirs.fileno()), *arguments]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.channel = Channel(ours)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.channel.close()


class Pair:
    """A drafter, a target, and this process between them."""

    def __init__(self, layout):
        self.layout = layout
        self.drafter, self.target = Peer("drafter", json.dumps(layout.to_dict())), Peer("target")
        record, (self.fd,) = self.drafter.channel.receive_with_fds(timeout=60)
        assert record == SlotsOffered(0, layout.to_dict())
        self.open_at_target()

    def open_at_target(self):
        self.target.channel.send(OpenSlots(0, 0, self.layout.to_dict()), [self.fd])
        assert self.target.channel.receive(timeout=60) == Phase("mapped")

    def pids(self):
        return {self.drafter.process.pid, self.target.process.pid}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.drafter.kill()
        self.target.kill()
        if self.fd >= 0:
            os.close(self.fd)


@pytest.fixture(autouse=True)
def nothing_stays():
    before = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= before


def make_pack(seq, layout):
    tokens = 1 + seq % layout.capacity
    spans = (DocumentSpan(seq, 0, tokens, 1),)
    return Pack(seq, 0, spans, np.full(tokens, seq, dtype=np.int32), np.ones(tokens, dtype=bool))


def stream(pair, seqs):
    """All packs through the slots, as many at a time as the pool has places. Returns what the drafter found wrong."""
    pool, waiting, leased, wrong, freed = SlotPool(pair.layout.count), iter(seqs), {}, [], 0
    target, drafter = pair.target.channel, pair.drafter.channel
    head = next(waiting, None)
    with selectors.DefaultSelector() as selector:
        for channel in (target, drafter):
            selector.register(channel, channel.events)
        while freed < len(seqs):
            while head is not None and (slot := pool.lease(head)) is not None:
                leased[head] = (slot, make_pack(head, pair.layout))
                target.post(Lease(head, 0, *leased[head]))
                head = next(waiting, None)
            for channel in (target, drafter):
                channel.watch(selector)
            ready = selector.select(30)
            assert ready, "nobody says anything"
            for key, _ in ready:
                key.fileobj.flush()
                for record, _ in key.fileobj.pending():
                    if isinstance(record, Filled):
                        slot, pack = leased.pop(record.lease)
                        pool.fill(slot, pack.seq)
                        pool.read(slot, pack.seq)
                        drafter.post(Deliver(slot, pack))
                    elif isinstance(record, Freed):
                        pool.free(record.slot, record.seq)
                        freed += 1
                    else:
                        assert isinstance(record, Failed)
                        wrong.append(record.error)
    return wrong


def test_no_slot_is_used_again_before_its_last_read():
    """Case 64: 5,000 packs through 2 slots, every element compared; and the test sees the fault it looks for."""
    with Pair(SMALL) as pair:
        assert stream(pair, range(3500)) == []
        pair.drafter.channel.send(Phase("slow"))
        assert stream(pair, range(3500, 5000)) == []
        pair.drafter.channel.send(Phase("careless"))
        assert len(stream(pair, range(5000, 5100))) > 10


def holders():
    """Processes that have slots open or mapped."""
    return {int(entry.name) for entry in Path("/proc").glob("[0-9]*") if holds(entry)}


def holds(process):
    name = "memfd:draftmill-slots"
    try:
        return name in (process / "maps").read_text() or any(name in link for link in links(process / "fd"))
    except OSError:  # it has ended meanwhile
        return False


def links(folder):
    for entry in folder.iterdir():
        with suppress(FileNotFoundError):  # what the listing itself had open
            yield os.readlink(entry)


def shared_memory():
    """Bytes of shared memory in use on this machine."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["Shmem"].split()[0]) * 1024


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_memory_is_gone_with_the_processes_however_they_end():
    """Case 49: the target is killed and replaced, then the drafter is killed, then that target closes its mapping."""
    start, half = shared_memory(), LARGE.file_bytes // 2
    with Pair(LARGE) as pair:
        assert shared_memory() - start > half
        assert stream(pair, range(4)) == []
        pair.target.kill()
        assert pair.drafter.process.pid in holders()
        pair.target = Peer("target")
        pair.open_at_target()
        assert stream(pair, range(4, 8)) == []  # the drafter has noticed nothing
        pair.drafter.kill()
        os.close(pair.fd)
        pair.fd = -1
        assert holders() & pair.pids() == {pair.target.process.pid}
        assert shared_memory() - start > half
        pair.target.channel.send(CloseSlots(0, 0))
        assert pair.target.channel.receive(timeout=30) == SlotsClosed(0, 0)
        assert not holders() & pair.pids()
        wait_until(lambda: shared_memory() - start < half)
        assert pair.target.process.poll() is None


def test_both_killed_leave_nothing():
    start, half = shared_memory(), LARGE.file_bytes // 2
    pair = Pair(LARGE)
    with pair:
        assert shared_memory() - start > half and pair.pids() | {os.getpid()} <= holders()
    assert not holders() & (pair.pids() | {os.getpid()})
    wait_until(lambda: shared_memory() - start < half)


def test_one_memory_seen_by_both_ends():
    made = SharedSlots.create(SMALL)
    seen = SharedSlots.attach(SlotLayout.from_dict(SMALL.to_dict()), os.dup(made.fd))
    for slot in range(SMALL.count):
        seen.write(slot, torch.full((24, 40), float(slot + 1)))
    assert [made.read(slot, 24).unique().tolist() for slot in range(SMALL.count)] == [[1.0], [2.0]]
    assert made.read(1, 24).data_ptr() % mmap.PAGESIZE == 0
    assert SMALL.slot_bytes < SMALL.stride == mmap.PAGESIZE and os.fstat(made.fd).st_size == SMALL.file_bytes
    assert not os.get_inheritable(made.fd)
    seen.close()
    seen.close()
    for use in (lambda: seen.read(0, 1), lambda: seen.write(0, torch.zeros(1, 40))):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert made.read(0, 24).eq(1).all()
    made.close()
    assert os.getpid() not in holders()


def test_memory_is_not_pulled_away_from_under_a_reader():
    memory = SharedSlots.create(SMALL)
    memory.write(0, torch.ones(2, 40))
    view = memory.read(0, 2)
    with pytest.raises(RuntimeError, match="in use"):
        memory.close()
    assert view.eq(1).all() and os.getpid() in holders()
    del view
    gc.collect()
    del memory
    assert os.getpid() not in holders()


def test_other_memory_is_refused_and_its_descriptor_closed(tmp_path):
    made = SharedSlots.create(SMALL)
    for size in (0, SMALL.file_bytes + mmap.PAGESIZE):  # nobody can change it under us
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(made.fd, size)
    wider = SlotLayout(3, 24, 40, "float32")
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, SMALL.file_bytes)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SMALL.file_bytes)
    for layout, fd, reason in (
        (wider, os.dup(made.fd), f"takes {3 * mmap.PAGESIZE} bytes, but the memory received has {2 * mmap.PAGESIZE}"),
        (SMALL, file, "not sealed"),
        (SMALL, unsealed, "not sealed"),
    ):
        with pytest.raises(ValueError, match=reason):
            SharedSlots.attach(layout, fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    made.close()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"count": 2, "capacity": 24, "feature_size": 40},
        SMALL.to_dict() | {"more": 1},
        SMALL.to_dict() | {"count": 0},
        SMALL.to_dict() | {"capacity": 1.5},
        SMALL.to_dict() | {"dtype": "int64"},
    ],
)
def test_layouts_that_cannot_be_are_refused(values):
    with pytest.raises(ValueError, match="no layout"):
        SlotLayout.from_dict(values)
