"""Waits for newer routing at the metadata services, in daemon threads. docs/client.md, Routing.

Up to two threads, each with a connection of its own: while one waits at a service that stands still, the
other one hears of changes. A service that answers late (a long poll) would hold up requests that share its
connection, hence their own.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from typing import Final

from ffs.client.caller import Caller
from ffs.client.connection import ConnectionOptions, Link
from ffs.client.retry import Policy
from ffs.client.routing import Routing
from ffs.errors import FfsError
from ffs.proto.cluster import GetRouting, RoutingReply
from ffs.rpc.address import Address

WAIT_MS: Final = 10_000
"""How long a service waits for a change before it answers that there is none."""

_REPLY_TIMEOUT_S: Final = WAIT_MS / 1000 + 2.0
_FIRST_PAUSE_S: Final = 0.05
_MOST_PAUSE_S: Final = 2.0
_MOST_WATCHERS: Final = 2

_log = logging.getLogger(__name__)


class Watch:
    """Keeps a Routing up to date from `start` to `close`. Thread-safe."""

    def __init__(self, servers: Sequence[Address], routing: Routing, options: ConnectionOptions) -> None:
        """Makes no connection and no thread."""
        self._servers = tuple(servers)
        self._routing = routing
        self._options = ConnectionOptions(
            secret=options.secret,
            name=f"{options.name} routing",
            connect_timeout_s=options.connect_timeout_s,
            reply_timeout_s=_REPLY_TIMEOUT_S,
        )
        self._lock = threading.Lock()
        self._closed = False
        self._watchers: list[_Watcher] = []

    @property
    def in_contact(self) -> bool:
        """Whether some service answers: what happens in the cluster is heard of."""
        return any(watcher.in_contact for watcher in self._watchers)

    def start(self, cluster: bytes) -> None:
        """Begin to watch services of this cluster. Repeatable; nothing after close."""
        with self._lock:
            if self._watchers or self._closed:
                return
            # Each service belongs to one watcher, so that two never wait at the same one.
            count = min(_MOST_WATCHERS, len(self._servers))
            self._watchers = [
                _Watcher(Link(self._servers[k::count], cluster, self._options), self._routing)
                for k in range(count)
            ]
            for watcher in self._watchers:
                watcher.start()

    def hurry(self) -> None:
        """Requests wait for newer routing: a watcher that pauses after a failure tries again now."""
        for watcher in self._watchers:
            watcher.hurry()

    def close(self) -> None:
        """End the threads and their connections. Repeatable. Returns when they have ended, or after 2 s."""
        with self._lock:
            self._closed = True
        for watcher in self._watchers:
            watcher.ask_to_end()
        end = time.monotonic() + 2.0
        for watcher in self._watchers:
            watcher.wait_end(end)

    def abandon(self) -> None:
        """In a child of fork: the threads aren't here; closes the inherited descriptors quietly."""
        for watcher in self._watchers:
            watcher.abandon()


class _Watcher:
    """One thread that waits at one service at a time."""

    def __init__(self, link: Link, routing: Routing) -> None:
        self._link = link
        self._caller = Caller(link, Policy(deadline_s=0.0))
        self._routing = routing
        self._ended = False
        self._news = threading.Event()  # a pause is over: hurry, or the end
        self._thread = threading.Thread(target=self._run, name="ffs-routing", daemon=True)
        self._failures = 0
        self._idle_turns = 0  # in which a service answered at once without anything new
        self.in_contact = True
        """Until the contrary is seen."""

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        if self._failures and not self._ended:
            self._news.set()

    def ask_to_end(self) -> None:
        self._ended = True
        self._news.set()
        self._link.close()

    def wait_end(self, until: float) -> None:
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, until - time.monotonic()))

    def abandon(self) -> None:
        self._ended = True
        self._link.abandon()

    def _run(self) -> None:
        while not self._ended:
            at = self._link.at
            began = time.monotonic()
            request = GetRouting(known_epoch=self._routing.epoch, wait_ms=WAIT_MS)
            try:
                reply = self._caller.call(request, RoutingReply)
            except FfsError as error:
                self._after_failure(at, error)
                continue
            self._failures = 0
            self.in_contact = True
            if self._ended or self._routing.take(reply) or time.monotonic() - began > WAIT_MS / 2000:
                self._idle_turns = 0
                continue
            # It knows less than we do, or doesn't wait: not at the speed of the wire.
            self._idle_turns = min(self._idle_turns + 1, 10)
            self._news.wait(min(_FIRST_PAUSE_S * 2**self._idle_turns, _MOST_PAUSE_S))

    def _after_failure(self, at: int, error: FfsError) -> None:
        if self._ended:
            return
        self.in_contact = False
        self._failures += 1
        _log.debug("no news of routing (%d): %s", self._failures, error)
        self._link.turn_from(at)
        pause_s = min(_FIRST_PAUSE_S * 2 ** min(self._failures - 1, 10), _MOST_PAUSE_S)
        pause_s *= random.uniform(0.5, 1.0)
        # However many hurry: at most one look in the first pause.
        time.sleep(min(pause_s, _FIRST_PAUSE_S))
        if self._news.wait(max(0.0, pause_s - _FIRST_PAUSE_S)) and not self._ended:
            self._news.clear()
