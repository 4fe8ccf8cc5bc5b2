"""The asking side for threads: one connection shared by all threads of a process.

Threads share it by combining: a thread puts its frame in the outgoing list; whoever finds nobody
sending sends all that is there in one call; whoever finds nobody reading reads for all, hands out
the replies, and hands the reading on when it has its own. A thread that finds the connection idle
does both itself and wakes nobody. docs/control_plane.md, Askers, says what this is worth.
Pool (ffs.rpc.pool) adds addresses, failover and fork.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Final

from ffs.errors import ConnectionLost, DeadlineExceeded, FfsError, ShutDown, Unreachable
from ffs.rpc.address import Address, format_address
from ffs.rpc.aio import unreachable
from ffs.rpc.codec import result_of
from ffs.rpc.frame import CANCEL, REPLY, REQUEST, FrameDecoder, encode_frame
from ffs.rpc.handshake import AskerHandshake

RECV_BYTES: Final = 256 * 1024
TICK_S: Final = 0.25  # how late a timeout may come
SEND_TIMEOUT_S: Final = 30  # a server that takes nothing for so long is lost


class _Waiter:
    """One exchange: consecutive request ids from `first` on. `lock` is held until `missing` is 0,
    or until the thread is to lead: read for all."""

    __slots__ = ("bodies", "error", "first", "lead", "lock", "missing")

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.bodies: list[bytes] = [b""] * count
        self.missing = count
        self.error: FfsError | None = None
        self.lead = False
        self.lock = threading.Lock()
        self.lock.acquire()

    def done(self) -> bool:
        return self.missing == 0 or self.error is not None


class BlockingConnection:
    """One greeted connection. `exchange` may be called by any threads at a time; the rest likewise."""

    def __init__(self, address: Address, handshake: AskerHandshake, timeout_s: float) -> None:
        """Connects and greets, blocking. Raises Unreachable, WrongCluster, Unauthenticated,
        VersionMismatch, ProtocolError."""
        self.address = address
        self.lost: FfsError | None = None
        self._mutex = threading.Lock()  # guards all below but the decoder, which is the reader's
        self._waiting: dict[int, _Waiter] = {}
        self._out: list[bytes] = []
        self._sending = False
        self._reading = False
        self._next = 1
        self._decoder = FrameDecoder()
        self._socket = _connect(address, timeout_s)
        deadline = time.monotonic() + timeout_s
        try:
            body: bytes | None = handshake.hello
            while body is not None:
                body = handshake.receive(result_of(self.exchange([body], deadline)[0]))
        except DeadlineExceeded:
            self.close()
            raise Unreachable(f"no answer from {format_address(address)} within {timeout_s:g} s") from None
        except FfsError:
            self.close()
            raise
        assert handshake.reply is not None
        self.cluster = handshake.reply.cluster

    def exchange(self, bodies: Sequence[bytes], deadline: float) -> list[bytes]:
        """Sends the requests together, waits for all replies; their bodies, in order. Blocking, until
        `deadline` (of time.monotonic) at most TICK_S late.

        Raises DeadlineExceeded; ConnectionLost or another error, after which the connection is `lost`."""
        send = False
        try:
            with self._mutex:
                if self.lost is not None:
                    raise type(self.lost)(self.lost.message)
                first = self._next
                self._next = first + len(bodies)
                waiter = _Waiter(first, len(bodies))
                for request_id, body in enumerate(bodies, first):
                    self._out.append(encode_frame(REQUEST, request_id, body))
                    self._waiting[request_id] = waiter
                send = not self._sending
                self._sending = True
            if send:
                self._send_all()
        except BaseException:
            if (
                send
            ):  # by a signal: perhaps half a frame is out, and nobody else would send the others' requests
                self._sending = False
                self._fail(
                    ConnectionLost(f"connection to {format_address(self.address)}: a send was interrupted")
                )
            raise
        self._wait(waiter, deadline)
        if waiter.error is not None:
            raise type(waiter.error)(waiter.error.message)
        return waiter.bodies

    def close(self) -> None:
        """Ends it; threads that wait get ShutDown. Repeatable."""
        self._fail(ShutDown(f"the connection to {format_address(self.address)} was closed"))

    def forget(self) -> None:
        """In a child of fork: closes the inherited descriptor, without a word to the server."""
        self.lost = ShutDown("this connection belongs to the parent process")
        fd = self._socket.detach()
        if fd >= 0:
            os.close(fd)

    # sending

    def _send_all(self) -> None:
        """Sends until the outgoing list is empty. One thread at a time is here."""
        while True:
            with self._mutex:
                if not self._out or self.lost is not None:
                    self._sending = False
                    self._close_if_unused()
                    return
                data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
                self._out.clear()
            try:
                self._socket.sendall(data)
            except OSError as error:
                self._fail(_lost(self.address, error))

    # receiving

    def _wait(self, waiter: _Waiter, deadline: float) -> None:
        """Until `waiter` is done: its bodies or its error are there."""
        if not self._take_lead(waiter):
            left = deadline - time.monotonic()
            if not waiter.lock.acquire(timeout=max(0.0, min(left, threading.TIMEOUT_MAX))):
                self._give_up(waiter)
            if not waiter.lead:
                return
        try:
            self._lead_until(waiter, deadline)
        finally:
            self._pass_on()

    def _take_lead(self, waiter: _Waiter) -> bool:
        with self._mutex:
            if self._reading or waiter.done():
                return False
            self._reading = waiter.lead = True
            return True

    def _lead_until(self, waiter: _Waiter, deadline: float) -> None:
        """Reads for everybody until `waiter` is done."""
        while not waiter.done():
            try:
                data = self._socket.recv(RECV_BYTES)
                if not data:
                    raise ConnectionLost(f"{format_address(self.address)} closed the connection")
                self._deliver(data)
            except BlockingIOError:  # SO_RCVTIMEO: a tick without data
                pass
            except FfsError as error:
                self._fail(error)
            except OSError as error:
                self._fail(_lost(self.address, error))
            if time.monotonic() >= deadline and not waiter.done():
                self._give_up(waiter, leading=True)

    def _deliver(self, data: bytes) -> None:
        frames = self._decoder.feed(data)
        with self._mutex:
            for kind, request_id, body in frames:
                if kind != REPLY:
                    continue
                waiter = self._waiting.pop(request_id, None)
                if waiter is not None:
                    waiter.bodies[request_id - waiter.first] = body
                    waiter.missing -= 1
                    if waiter.missing == 0 and not waiter.lead:
                        waiter.lock.release()
                elif request_id == 0:
                    break
            else:
                return
        result_of(body)  # raises: the connection as a whole is refused

    def _pass_on(self) -> None:
        """Gives the reading to a thread that waits, if there is one."""
        with self._mutex:
            for waiter in self._waiting.values():
                if not waiter.lead:
                    waiter.lead = True
                    waiter.lock.release()
                    return
            self._reading = False
            self._close_if_unused()

    # endings

    def _give_up(self, waiter: _Waiter, *, leading: bool = False) -> None:
        """The time is up. What arrived in this moment counts, and so does a lead just handed over."""
        with self._mutex:
            if waiter.done() or (waiter.lead and not leading):
                return
            waiter.error = DeadlineExceeded(f"no reply from {format_address(self.address)} by the deadline")
            for request_id in range(waiter.first, waiter.first + len(waiter.bodies)):
                if self._waiting.pop(request_id, None) is not None:
                    self._out.append(encode_frame(CANCEL, request_id, b""))
            send = not self._sending
            self._sending = True
        if send:
            self._send_all()

    def _fail(self, error: FfsError) -> None:
        with self._mutex:
            if self.lost is None:
                self.lost = error
                with contextlib.suppress(OSError):  # not connected any more
                    self._socket.shutdown(socket.SHUT_RDWR)
            waiting, self._waiting = set(self._waiting.values()), {}
            self._out.clear()
            for waiter in waiting:
                waiter.error = self.lost
                if not waiter.lead:
                    waiter.lock.release()
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        """Under the mutex. A descriptor that a thread is inside must not be closed."""
        if self.lost is not None and not self._reading and not self._sending:
            self._socket.close()


def _lost(address: Address, error: OSError) -> ConnectionLost:
    return ConnectionLost(f"connection to {format_address(address)}: {error.strerror or error}")


def _connect(address: Address, timeout_s: float) -> socket.socket:
    """A connected socket whose calls block, bounded by the kernel's own timeouts (no poll a call)."""
    try:
        sock = socket.create_connection(address, timeout_s)
    except OSError as error:
        raise unreachable(address, error) from None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, int(TICK_S * 1e6)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_TIMEOUT_S, 0))
    return sock
