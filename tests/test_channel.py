"""Records over a socket: whole, in order, with their descriptors; nobody waits for ever, and an end is noticed."""

import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from draftmill.run import channel as channel_module
from draftmill.run.channel import Channel, PeerClosed, socketpair
from draftmill.wire import (
    Deliver,
    DocumentSpan,
    Failed,
    Filled,
    Freed,
    OpenSlots,
    Pack,
    Phase,
    SlotsOffered,
    Stop,
    WireError,
    encode,
)


def open_descriptors():
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def ends():
    before = open_descriptors()
    ours, theirs = (Channel(end) for end in socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()
    assert open_descriptors() == before


@pytest.fixture
def raw_end():
    """A channel, and its peer's bare socket."""
    ours, theirs = socketpair()
    channel = Channel(ours)
    with theirs:
        yield channel, theirs
        channel.close()


def frame(record, descriptors=0):
    data = encode(record)
    return struct.pack("<IB", len(data), descriptors) + data


@contextmanager
def soon(action, *arguments):
    """`action` happens in another thread while the block waits for it."""
    timer = threading.Timer(0.05, action, arguments)
    timer.start()
    yield
    timer.join()


def large(seq, tokens=2_000_000):
    """A record of 10 MB, far more than a socket holds."""
    ids = np.arange(tokens, dtype=np.int32) + seq
    return Deliver(0, Pack(seq, 0, (DocumentSpan(0, 0, tokens, 1),), ids, ids % 3 == 0))


def heard(channel):
    return [record for record, _ in channel.pending()]


def memory_file(content):
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def content(fd):
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return file.read()


def test_half_a_record_is_kept_until_it_is_whole(raw_end):
    channel, peer = raw_end
    for byte in frame(Freed(7, 1)):
        assert heard(channel) == []
        peer.sendall(bytes([byte]))
    assert heard(channel) == [Freed(7, 1)]
    both = frame(Filled(1)) + frame(Filled(2))
    peer.sendall(both[:-3])
    assert heard(channel) == [Filled(1)]
    assert channel.receive(timeout=0.01) is None
    peer.sendall(both[-3:])
    assert channel.receive() == Filled(2)


def test_many_records_arrive_in_order(ends):
    ours, theirs = ends
    count = 3000  # more than the socket holds at once
    for number in range(count):
        ours.post(Filled(number))
    received = []
    while len(received) < count:
        received += heard(theirs)
        ours.flush()
    assert received == [Filled(number) for number in range(count)]
    assert ours.events == selectors.EVENT_READ


def test_receive_waits_no_longer_than_told(ends):
    ours, theirs = ends
    started = time.monotonic()
    assert ours.receive(timeout=0.1) is None and ours.receive_with_fds(timeout=0) is None
    assert 0.1 <= time.monotonic() - started < 5
    with soon(theirs.post, Phase("ready")):
        assert ours.receive(timeout=30) == Phase("ready")


def test_descriptors_come_with_the_record_that_carried_them(ends):
    ours, theirs = ends
    layout = {"count": 1}
    sent = [memory_file(word) for word in (b"one", b"two", b"three")]
    ours.post(Phase("loading"))
    ours.post(SlotsOffered(0, layout), sent[:1])
    ours.post(Phase("ready"))
    ours.post(OpenSlots(1, 0, layout), sent[1:])
    for fd in sent:
        os.close(fd)  # the sender's own to close
    got = []
    while len(got) < 4:
        got += theirs.pending()
    assert [record for record, _ in got] == [
        Phase("loading"), SlotsOffered(0, layout), Phase("ready"), OpenSlots(1, 0, layout),
    ]  # fmt: skip
    assert not any(os.get_inheritable(fd) for _, fds in got for fd in fds)
    assert [[content(fd) for fd in fds] for _, fds in got] == [[], [b"one"], [], [b"two", b"three"]]


def test_descriptors_behind_a_full_socket_and_those_nobody_takes(ends):
    ours, theirs = ends
    fd = memory_file(b"late")
    ours.post(large(1))
    ours.post(SlotsOffered(0, {}), [fd])
    ours.post(SlotsOffered(1, {}), [fd])
    ours.post(SlotsOffered(2, {}), [fd])
    os.close(fd)
    reader = threading.Thread(target=lambda: [ours.flush() or time.sleep(0.001) for _ in iter(lambda: ours.events, 1)])
    reader.start()
    assert theirs.receive().pack.seq == 1
    record, (got,) = theirs.receive_with_fds()
    assert record == SlotsOffered(0, {}) and content(got) == b"late"
    assert theirs.receive() == SlotsOffered(1, {})  # closes what came with it; the third is closed with the channel
    reader.join()


def test_too_much_is_refused_by_the_sender(ends, monkeypatch):
    ours, theirs = ends
    monkeypatch.setattr(channel_module, "LARGEST_RECORD", 1000)
    with pytest.raises(WireError, match="at most 1000"):
        ours.post(Failed("too long", "x" * 1000))
    with pytest.raises(WireError, match="9 descriptors"):
        ours.post(SlotsOffered(0, {}), [0] * 9)
    ours.post(Stop())
    assert heard(theirs) == [Stop()]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "this is no channel"),
        (struct.pack("<IB", 2**31, 0), "this is no channel"),
        (struct.pack("<IB", 5, 0) + b"abcde", "header"),
        (frame(SlotsOffered(0, {}), descriptors=1), "1 descriptors came with 0"),
    ],
)
def test_foreign_bytes_are_an_error_after_what_was_right(raw_end, data, message):
    channel, peer = raw_end
    peer.sendall(frame(Filled(1)) + data)
    arrived = channel.pending()
    assert next(arrived) == (Filled(1), ())
    with pytest.raises(WireError, match=message):
        next(arrived)


@pytest.mark.parametrize("unread", [Stop(), large(1)], ids=["read by nobody", "not even written"])
def test_last_words_are_heard_before_the_end(ends, unread):
    ours, theirs = ends
    ours.post(unread)  # the kernel calls what follows a reset
    theirs.post(Failed("ValueError", "..."))
    theirs.post(Filled(1))
    theirs.close()
    ours.flush()
    with pytest.raises(PeerClosed):
        ours.send(Filled(1))
    said = []
    with pytest.raises(PeerClosed):  # noqa: PT012 - how many calls it takes is the kernel's choice
        while True:
            for record, _ in ours.pending():
                said.append(record)
    assert said == [Failed("ValueError", "..."), Filled(1)]
    assert ours.events == selectors.EVENT_READ  # nothing is left to write


def test_waiting_ends_when_the_peer_does(ends):
    ours, theirs = ends
    theirs.post(Failed("ValueError", "..."))
    assert ours.receive() == Failed("ValueError", "...")
    with soon(theirs.close), pytest.raises(PeerClosed):
        ours.receive()
    for wait in (ours.receive_with_fds, lambda: ours.receive(timeout=30)):
        with pytest.raises(PeerClosed):
            wait()
    ours.close()
    for use in (lambda: ours.post(Stop()), lambda: ours.send(Stop()), ours.receive, lambda: heard(ours)):
        with pytest.raises(PeerClosed):
            use()


def test_a_sender_that_waits_notices_the_end(ends):
    ours, theirs = ends
    with soon(theirs.close), pytest.raises(PeerClosed):
        ours.send(large(1))
    assert ours.events == selectors.EVENT_READ


def test_two_workers_that_send_large_records_to_each_other_get_on(ends):
    """Each sends all before it reads any."""
    count, got = 5, {}

    def work(name, channel):
        for seq in range(count):
            channel.send(large(seq))
        got[name] = [channel.receive(timeout=60) for _ in range(count)]

    threads = [threading.Thread(target=work, args=item) for item in enumerate(ends)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for records in (got[0], got[1]):
        for seq, record in enumerate(records):
            assert np.array_equal(record.pack.token_ids, large(seq).pack.token_ids)
            assert np.array_equal(record.pack.supervised, large(seq).pack.supervised)


ECHO = """
import sys, socket
from draftmill.run.channel import Channel, PeerClosed
channel = Channel(socket.socket(fileno=int(sys.argv[1])))
try:
    while True:
        channel.send(channel.receive())
except PeerClosed:
    pass
"""
STUCK = """
import sys, socket, struct, time
peer = socket.socket(fileno=int(sys.argv[1]))
whole = bytes.fromhex(sys.argv[2])
peer.sendall(whole + struct.pack("<IB", 1_000_000, 0) + b"half of a record")
time.sleep(600)
"""


def spawn(code, *arguments):
    ours, theirs = socketpair()
    with theirs:
        command = [sys.executable, "-c", code, str(theirs.fileno()), *arguments]
        return Channel(ours), subprocess.Popen(command, pass_fds=[theirs.fileno()])


def test_a_supervisor_that_never_waits_serves_peers_that_send_as_much():
    """Both directions are full at times: the supervisor keeps what does not fit, and reads on."""
    workers = [spawn(ECHO) for _ in range(2)]
    count, got = 6, {0: [], 1: []}
    with selectors.DefaultSelector() as selector:
        for index, (channel, _) in enumerate(workers):
            selector.register(channel, channel.events, index)
            for seq in range(count):
                channel.post(large(seq, tokens=400_000))
        deadline = time.monotonic() + 60
        while any(len(records) < count for records in got.values()):
            assert time.monotonic() < deadline
            for channel, _ in workers:
                channel.watch(selector)
            for key, events in selector.select(1):
                if events & selectors.EVENT_WRITE:
                    key.fileobj.flush()
                if events & selectors.EVENT_READ:
                    got[key.data] += heard(key.fileobj)
    for records in got.values():
        assert [record.pack.seq for record in records] == list(range(count))
        assert all(np.array_equal(r.pack.token_ids, large(r.pack.seq, 400_000).pack.token_ids) for r in records)
    for channel, process in workers:
        channel.close()
        assert process.wait(30) == 0  # a closed socket ends a worker


def test_a_peer_killed_inside_a_record():
    channel, process = spawn(STUCK, frame(Filled(3)).hex())
    assert channel.receive(timeout=30) == Filled(3)
    assert channel.receive(timeout=0.2) is None
    assert heard(channel) == []
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(PeerClosed, match="21 bytes into a record"):
        channel.receive(timeout=30)
    with pytest.raises(PeerClosed):
        channel.post(Stop())
    channel.close()


def test_a_peer_that_talks_without_end_does_not_hold_up_the_others(raw_end):
    channel, peer = raw_end
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    word = frame(Filled(1))
    peer.setblocking(False)
    sent = 0
    try:
        while True:
            sent += peer.send(word * 1000)
    except BlockingIOError:
        pass
    assert sent > 2 * channel_module._CHUNK
    assert len(heard(channel)) <= channel_module._CHUNK // len(word)


def test_a_channel_is_not_inherited_by_children():
    ours, theirs = socketpair()
    theirs.set_inheritable(True)  # as `pass_fds` leaves it
    channel = Channel(theirs)
    assert not os.get_inheritable(channel.fileno())
    channel.close()
    ours.close()
