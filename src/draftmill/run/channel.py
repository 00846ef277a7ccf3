"""A channel: records, and file descriptors beside them, over one stream socket to one other process.

    length of the record (uint32) | number of descriptors (uint8) | the record's bytes (wire)

A record arrives whole or not at all, in order, and with the descriptors that were sent with it. The socket never
blocks: what does not fit into it now is kept here, and so is half a record that has arrived. Two ways to use it:

- A worker has one channel and may wait. `send` returns when all is in the socket, `receive` when a record is there.
  `send` reads while it waits, so two ends that both send more than the socket holds still get on.
- A supervisor has many and never waits. Register each with a selector for its `events`; `post` to send, `pending`
  when readable, `flush` when writable. `events` changes with what is left to write: `watch` keeps it right.

The other end's death is PeerClosed: for who sends at once, for who receives after everything it had said before.
For one thread.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from draftmill.wire import Record, WireError, decode, encode

LARGEST_RECORD = 64 << 20  # bytes; a pack of a million tokens takes 5 million
MOST_DESCRIPTORS = 8  # beside one record
_HEAD = struct.Struct("<IB")
_CHUNK = 1 << 18  # bytes taken from the socket at a time
_DESCRIPTOR = struct.Struct("i")
_EXTRA = socket.CMSG_SPACE(MOST_DESCRIPTORS * _DESCRIPTOR.size)

Descriptors = tuple[int, ...]


class PeerClosed(ConnectionError):
    """The other end is gone, or this end has been closed."""


@dataclass(slots=True)
class _Frame:
    """A record on its way out. Owns its descriptors until they are sent."""

    left: memoryview
    descriptors: Descriptors

    def drop_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()


def socketpair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends. One is for a Channel here, the other's number for `pass_fds` of a new process."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


class Channel:
    """Owns its socket. Descriptors handed out belong to the receiver; those handed in stay the sender's."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        peer.set_inheritable(False)  # one that came by `pass_fds` was
        self._socket = peer
        self._incoming = bytearray()
        self._arrived: deque[int] = deque()  # descriptors of records that are not yet whole
        self._outgoing: deque[_Frame] = deque()
        self._ended: str | None = None  # why nothing more will arrive
        self._deaf: str | None = None  # why nothing more can be sent

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """What is not yet written or read is lost."""
        self._ended = self._deaf = "closed at this end"
        self._drop_outgoing()
        self._incoming.clear()
        while self._arrived:
            os.close(self._arrived.popleft())
        self._socket.close()

    # Without waiting

    @property
    def events(self) -> int:
        """What a selector should look for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Make `selector`, where this channel is registered, look for what it should. To be called before `select`."""
        key = selector.get_key(self)
        if key.events != self.events:
            selector.modify(self, self.events, key.data)

    def post(self, record: Record, fds: Sequence[int] = ()) -> None:
        """Send as much as fits now, keep the rest for `flush`. Never waits. Raises PeerClosed."""
        data = encode(record)
        if len(data) > LARGEST_RECORD or len(fds) > MOST_DESCRIPTORS:
            raise WireError(
                f"{type(record).__name__} of {len(data)} bytes with {len(fds)} descriptors: a channel carries "
                f"at most {LARGEST_RECORD} and {MOST_DESCRIPTORS}"
            )
        self._check_deaf()
        frame = memoryview(_HEAD.pack(len(data), len(fds)) + data)
        self._outgoing.append(_Frame(frame, tuple(os.dup(fd) for fd in fds)))
        self.flush()
        self._check_deaf()

    def flush(self) -> None:
        """Write what fits now. Where the other end is gone it is dropped: `pending` says so, after its last words."""
        try:
            while self._outgoing:
                frame = self._outgoing[0]
                sent = socket.send_fds(self._socket, [frame.left], frame.descriptors)
                frame.drop_descriptors()  # they are with the first byte
                frame.left = frame.left[sent:]
                if not frame.left:
                    self._outgoing.popleft()
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError) as error:
            self._deaf = f"the other end is gone: {error}"
            self._drop_outgoing()

    def feed(self) -> None:
        """Take what has arrived, up to a limit: a peer that talks without end cannot hold up the others."""
        if self._ended is not None:
            return
        try:
            # not socket.recv_fds: that of Python 3.11 drops the flags, and children would inherit what arrives
            data, extra, flags, _ = self._socket.recvmsg(_CHUNK, _EXTRA, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except ConnectionResetError:  # it left without reading everything
            data, extra, flags = b"", [], 0
        for level, kind, numbers in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(numbers) // _DESCRIPTOR.size * _DESCRIPTOR.size
                self._arrived += (number for (number,) in _DESCRIPTOR.iter_unpack(numbers[:whole]))
        self._incoming += data
        if flags & socket.MSG_CTRUNC:
            raise WireError("descriptors were lost: too many at once, or too many open files here")
        if not data:
            self._ended = "the other end is gone"

    def pending(self) -> Iterator[tuple[Record, Descriptors]]:
        """Records that are complete now, with their descriptors. Never waits. Raises PeerClosed after the last one."""
        self.feed()
        while (found := self._take()) is not None:
            yield found
        self._check_open()

    # With waiting

    def send(self, record: Record, fds: Sequence[int] = ()) -> None:
        """Waits until all of it is in the socket; unblocked by the other end reading, or its end (PeerClosed)."""
        self.post(record, fds)
        while self._outgoing:
            self._wait(None)
            self.flush()
        self._check_deaf()

    @overload
    def receive(self, timeout: None = None) -> Record: ...
    @overload
    def receive(self, timeout: float) -> Record | None: ...
    def receive(self, timeout: float | None = None) -> Record | None:
        """The next record, None after `timeout` seconds. Descriptors beside it are closed. Raises PeerClosed."""
        found = self._next(timeout)
        if found is None:
            return None
        record, descriptors = found
        for descriptor in descriptors:
            os.close(descriptor)
        return record

    @overload
    def receive_with_fds(self, timeout: None = None) -> tuple[Record, Descriptors]: ...
    @overload
    def receive_with_fds(self, timeout: float) -> tuple[Record, Descriptors] | None: ...
    def receive_with_fds(self, timeout: float | None = None) -> tuple[Record, Descriptors] | None:
        """The next record and its descriptors, None after `timeout` seconds. Raises PeerClosed."""
        return self._next(timeout)

    def _next(self, timeout: float | None) -> tuple[Record, Descriptors] | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (found := self._take()) is None:
            self._check_open()
            left = None if deadline is None else deadline - time.monotonic()
            if not self._wait(left):
                return None
            if self._outgoing:
                self.flush()
        return found

    def _wait(self, seconds: float | None) -> bool:
        """Wait for anything to get on; take what has arrived. False: nothing within `seconds`."""
        poll = select.poll()
        reading = select.POLLIN if self._ended is None else 0
        poll.register(self._socket, reading | (select.POLLOUT if self._outgoing else 0))
        if not poll.poll(None if seconds is None else max(0.0, 1000 * seconds)):
            return False
        self.feed()
        return True

    # Records out of bytes

    def _take(self) -> tuple[Record, Descriptors] | None:
        """The first whole record that has arrived."""
        if len(self._incoming) < _HEAD.size:
            return None
        length, number = _HEAD.unpack_from(self._incoming)
        if length > LARGEST_RECORD or number > MOST_DESCRIPTORS:
            raise WireError(f"a record of {length} bytes with {number} descriptors cannot be: this is no channel")
        end = _HEAD.size + length
        if len(self._incoming) < end:
            return None
        data = bytes(self._incoming[_HEAD.size : end])
        del self._incoming[:end]
        if number > len(self._arrived):
            raise WireError(f"a record with {number} descriptors came with {len(self._arrived)}")
        descriptors = tuple(self._arrived.popleft() for _ in range(number))
        try:
            return decode(data), descriptors
        except WireError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def _check_open(self) -> None:
        if self._ended is not None:
            half = f", {len(self._incoming)} bytes into a record" if self._incoming else ""
            raise PeerClosed(self._ended + half)

    def _check_deaf(self) -> None:
        if self._deaf is not None:
            raise PeerClosed(self._deaf)

    def _drop_outgoing(self) -> None:
        for frame in self._outgoing:
            frame.drop_descriptors()
        self._outgoing.clear()
