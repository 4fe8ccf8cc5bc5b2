"""A client session: identity of mutations, native client, rings, capabilities. docs/client.md, Sessions.

A session is opened at the metadata service on first need and renewed by a daemon thread. It is
over when the service says so (the process was stopped for longer than the time to live), when
the client is closed, and in a child of fork, which gets a session of its own on first use.
Everything in it is bound to the session's client id, so it goes with it.

Thread-safe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ffs.client.caller import ONCE, Caller
from ffs.client.retry import Kind, Policy, kind_of
from ffs.client.routing import Routing
from ffs.client.slots import Slot, SlotTable
from ffs.client.watch import Watch
from ffs.errors import Fenced, FfsError
from ffs.proto import meta
from ffs.proto.cluster import ChainRoute, TargetRoute
from ffs.proto.common import Creds, Message, OkReply

if TYPE_CHECKING:
    from ffs._native.ring import NativeClient
    from ffs.client.lanes import LanePool
    from ffs.client.rings import RingPool

M = TypeVar("M", bound=Message)

_log = logging.getLogger(__name__)


class CapabilityEntry:
    """One capability that is kept alive: for which inode, by which write session, known to native as."""

    __slots__ = ("failure", "handle", "ino", "native_id", "renew_at", "rights", "ticket")

    def __init__(
        self, ino: int, handle: int, rights: int, native_id: int, renew_at: float, ticket: bytes
    ) -> None:
        self.ino = ino
        self.handle = handle
        self.rights = rights
        self.native_id = native_id
        self.renew_at = renew_at
        self.ticket = ticket
        self.failure: FfsError | None = None
        """Why the service refused the last renewal."""


class Session:
    """One session of one process. Made by `open_session`."""

    def __init__(
        self,
        caller: Caller,
        routing: Routing,
        watch: Watch,
        opened: meta.SessionOpened,
        creds: Creds,
        native_options: dict[str, Any],
    ) -> None:
        self.client_id = opened.client
        self.cluster = opened.cluster
        self.ttl_s = opened.ttl_ms / 1000
        self.creds = creds
        self.slots = SlotTable(min(opened.slots, meta.MAX_SLOTS))
        self.over = False
        self._caller = caller
        self._routing = routing
        self._watch = watch
        self._native_options = native_options
        self._lock = threading.Lock()
        self._native: NativeClient | None = None
        self._rings: RingPool | None = None
        self._lanes: LanePool | None = None
        self._capabilities: dict[int, CapabilityEntry] = {}
        self._clock_base = (opened.manager_time_ms, time.monotonic())
        self.news = threading.Event()  # for the renewal thread: `_wanted` isn't empty, or the end
        self._wanted: set[int] = set()  # capabilities that requests wait for

    # --- requests ---------------------------------------------------------------------------

    def call(self, request: meta.Request, reply: type[M], *, undo: meta.Request | None = None) -> M:
        """Carry out a mutation, once. Raises Fenced when the session is over, else as Caller.call.

        `undo` is sent, in one attempt, if the request is given up (interrupted, or no answer by the
        deadline): under the same slot, so that the request has no effect when it arrives later still."""
        if self.over:
            raise Fenced(_OVER)
        slot = self.slots.take()
        try:
            request.client = self.client_id
            request.slot = slot.number
            request.sequence = slot.sequence
            request.creds = self.creds
            return self._caller.call(request, reply, mutation=True)
        except Fenced:
            self.over = True
            raise
        except BaseException as error:
            if undo is not None and not (isinstance(error, FfsError) and kind_of(error) is Kind.REFUSED):
                self._undo(undo, slot)
            raise
        finally:
            self.slots.give(slot)

    def _undo(self, undo: meta.Request, slot: Slot) -> None:
        slot.sequence += 1
        undo.client, undo.slot, undo.sequence, undo.creds = (
            self.client_id,
            slot.number,
            slot.sequence,
            self.creds,
        )
        try:
            self._caller.call(undo, meta.REPLY_OF[type(undo)], mutation=True, policy=ONCE)
        except FfsError as error:
            _log.info("what was given up isn't undone before the session ends: %s", error)

    # --- native -----------------------------------------------------------------------------

    @property
    def native(self) -> NativeClient:
        """The native client, made on first use (fetches routing). Blocking then."""
        native = self._native
        if native is not None:
            return native
        with self._lock:
            if self._native is None:
                self._native = self._make_native()
            return self._native

    def _make_native(self) -> NativeClient:
        from ffs._native.ring import NativeClient
        from ffs.client.rings import native_chains, native_targets

        if self.over:
            raise Fenced(_OVER)
        native = NativeClient(self.client_id, self.cluster, **self._native_options)

        def set_routing(epoch: int, chains: Sequence[ChainRoute], targets: Sequence[TargetRoute]) -> None:
            native.set_routing(epoch, native_chains(chains), native_targets(targets))

        self._routing.subscribe(set_routing)
        self._watch.start(self.cluster)
        return native

    @property
    def rings(self) -> RingPool:
        """The internal rings of file objects, made on first use."""
        rings = self._rings
        if rings is not None:
            return rings
        from ffs.client.rings import RingPool

        native = self.native
        with self._lock:
            if self._rings is None:
                self._rings = RingPool(native)
            return self._rings

    @property
    def lanes(self) -> LanePool:
        """What files read ahead and write behind on, made on first use."""
        lanes = self._lanes
        if lanes is not None:
            return lanes
        from ffs.client.lanes import LanePool

        native = self.native
        with self._lock:
            if self._lanes is None:
                self._lanes = LanePool(native, self)
            return self._lanes

    def want_routing(self) -> None:
        """Requests wait for newer routing. Returns at once: it comes by itself when there is some."""
        self._watch.hurry()

    def describe_chain(self, chain: int) -> str:
        """A chain's members and their states, as far as is known here."""
        return self._routing.describe_chain(chain)

    def describe_target(self, target: int) -> str:
        """A target's server and its address, as far as is known here."""
        return self._routing.describe_target(target)

    def refresh_routing(self) -> bool:
        """Fetch newer routing, in one attempt. False if there is none, or no metadata service answers:
        data goes on with what is known."""
        try:
            return self._routing.refresh(once=True)
        except FfsError as error:
            _log.debug("routing isn't refreshed: %s", error)
            return False

    # --- capabilities -----------------------------------------------------------------------

    def manager_ms(self) -> int:
        """The manager's time, estimated: its last word plus what passed here since."""
        said, at = self._clock_base
        return said + int((time.monotonic() - at) * 1000)

    def add_capability(
        self, ino: int, handle: int, rights: int, capability: bytes, expiry_ms: int, ticket: bytes
    ) -> int:
        """Hand a capability to native and keep it renewed until `drop_capability`. Returns native's id."""
        native_id: int = self.native.add_capability(capability)
        entry = CapabilityEntry(ino, handle, rights, native_id, self._renewal_time(expiry_ms), ticket)
        self._capabilities[native_id] = entry
        return native_id

    def drop_capability(self, native_id: int) -> None:
        """Forget a capability. No error if the session is over."""
        if self._capabilities.pop(native_id, None) is not None and self._native is not None and not self.over:
            self._native.drop_capability(native_id)

    def replace_capability(self, native_id: int, capability: bytes, expiry_ms: int) -> None:
        """Put a newer capability (a new epoch, say) in the place of one that was added."""
        entry = self._capabilities[native_id]
        self.native.renew_capability(native_id, capability)
        entry.renew_at = self._renewal_time(expiry_ms)

    def renew_capability(self, native_id: int, *, once: bool = False) -> int:
        """Renew at the metadata service now. Returns the space's epoch. Blocking; raises as Caller.call."""
        entry = self._capabilities[native_id]
        request = meta.CapabilityRenew(
            ino=entry.ino,
            handle=entry.handle,
            rights=entry.rights,
            client=self.client_id,
            creds=self.creds,
            ticket=entry.ticket,
        )
        reply = self._caller.call(request, meta.CapabilityReply, policy=ONCE if once else None)
        self.replace_capability(native_id, reply.capability, reply.capability_expiry_ms)
        return reply.epoch

    def want_renewal(self, native_id: int) -> None:
        """Requests wait for this capability's renewal. Returns at once: the renewal thread sees to it."""
        self._wanted.add(native_id)
        self.news.set()

    def renewal_failure(self, native_id: int) -> FfsError | None:
        """Why the service refused to renew it the last time; None: it didn't."""
        entry = self._capabilities.get(native_id)
        return None if entry is None else entry.failure

    def _renewal_time(self, expiry_ms: int) -> float:
        """On the monotonic clock: when half of what is left has passed."""
        left_s = (expiry_ms - self.manager_ms()) / 1000
        return time.monotonic() + max(left_s / 2, 0.05)

    # --- keeping alive ------------------------------------------------------------------------

    def renew(self) -> None:
        """Renew the session and the capabilities that are due. One attempt each; for the renewal thread.

        Raises Fenced if the session is over. A service that can't be reached isn't an error here:
        the next turn tries again, and servers honour capabilities while no manager is in contact.
        """
        request = meta.SessionRenew(client=self.client_id, creds=self.creds)
        # A service that hangs takes a small part of the time to live only: there may be others.
        policy = Policy(deadline_s=0.0, reply_timeout_s=self.ttl_s / 6)
        try:
            reply = self._caller.call(request, meta.SessionRenewed, policy=policy)
        except Fenced:
            self.over = True
            raise
        self._clock_base = (reply.manager_time_ms, time.monotonic())
        now = time.monotonic()
        for entry in list(self._capabilities.values()):
            if entry.renew_at <= now:
                self._renew_quietly(entry)

    def renew_wanted(self) -> None:
        """Renew what requests wait for. One attempt each; for the renewal thread."""
        while self._wanted:
            entry = self._capabilities.get(self._wanted.pop())
            if entry is not None:
                self._renew_quietly(entry)

    def _renew_quietly(self, entry: CapabilityEntry) -> None:
        entry.failure = None
        try:
            self.renew_capability(entry.native_id, once=True)
        except KeyError:
            return  # dropped meanwhile
        except FfsError as error:
            # Whoever uses it gets the error with the file's name; here it is only early.
            if kind_of(error) in (Kind.REFUSED, Kind.SESSION_OVER):
                entry.failure = error
            entry.renew_at = time.monotonic() + min(self.ttl_s / 3, 5.0)
            _log.debug("capability of inode %d isn't renewed: %s", entry.ino, error)

    # --- ending -------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session: at the service too, if it answers at once. Blocking, bounded."""
        was_over, self.over = self.over, True
        self._routing.unsubscribe()
        self._release()
        if was_over:
            return
        request = meta.SessionClose(client=self.client_id, creds=self.creds)
        try:
            self._caller.call(request, OkReply, policy=ONCE)
        except FfsError as error:
            _log.debug("session %d ends by its time to live: %s", self.client_id, error)

    def abandon(self) -> None:
        """In a child of fork: let go of what belongs to the parent, without a word to any server."""
        self.over = True
        if self._lanes is not None:
            self._lanes.abandon()
            self._lanes = None
        self._release()

    def _release(self) -> None:
        if self._lanes is not None:
            self._lanes.close()
            self._lanes = None
        if self._rings is not None:
            self._rings.close()
            self._rings = None
        if self._native is not None:
            self._native.close()
            self._native = None
        self.news.set()


_OVER = (
    "the client session is over (closed, or not renewed in time while this process stood still);"
    " what is open for writing must be opened again"
)


def open_session(
    caller: Caller,
    routing: Routing,
    watch: Watch,
    creds: Creds,
    label: str,
    ttl_ms: int,
    native_options: dict[str, Any],
) -> Session:
    """Open a session at the metadata service. Blocking; raises as Caller.call."""
    request = meta.SessionOpen(label=label, ttl_ms=ttl_ms, creds=creds)
    opened = caller.call(request, meta.SessionOpened)
    return Session(caller, routing, watch, opened, creds, native_options)


class Renewer(threading.Thread):
    """The daemon thread that keeps a client's session alive. It ends with the session."""

    def __init__(self, session: Session) -> None:
        super().__init__(name="ffs-renew", daemon=True)
        self._session = session
        self._stopped = False

    def run(self) -> None:
        session = self._session
        turn_at = time.monotonic() + session.ttl_s / 4
        while True:
            session.news.wait(max(0.0, turn_at - time.monotonic()))
            session.news.clear()
            if session.over or self._stopped:
                return
            session.renew_wanted()
            if time.monotonic() < turn_at:
                continue
            turn_at = time.monotonic() + session.ttl_s / 4
            try:
                session.renew()
            except Fenced:
                return
            except FfsError as error:
                # Soon again, at the next service: an idle process has no other request that would turn to it.
                turn_at = time.monotonic() + min(session.ttl_s / 20, 1.0)
                _log.debug("session %d isn't renewed: %s", session.client_id, error)

    def stop(self) -> None:
        """Ask the thread to end; it may still be inside one request."""
        self._stopped = True
        self._session.news.set()
