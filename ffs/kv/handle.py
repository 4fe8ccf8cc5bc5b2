"""What an open KV space needs of the client: placement, epoch, and a capability that is kept renewed.

Opened again by itself in a child of fork and after the session was lost; `generation` grows then, and
rings made before are of no use. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ffs.client.paths import check_path, wire_path
from ffs.client.routing import check_layout_options
from ffs.errors import BadHandle, Exists, Fenced, InvalidArgument, StaleEpoch
from ffs.kv.bounds import Bounds, differences
from ffs.kv.geometry import Geometry
from ffs.proto import meta
from ffs.proto.common import RIGHT_READ, RIGHT_WRITE

if TYPE_CHECKING:
    from ffs._native.ring import NativeClient
    from ffs.client.client import Client
    from ffs.client.core import Core
    from ffs.client.session import Session
    from ffs.layout import Layout, Placement

_SERVERS_KNOW_S = 60.0  # after a space was made or changed its servers know its time to live


def _otherwise(core: Core, have: Layout, asked: meta.LayoutChoice | None) -> list[str]:
    """Where a space lies that was asked for elsewhere, in words."""
    if asked is None:
        return []
    table = next(route for route in core.routing.get().tables if route.id == have.table)
    found = []
    if asked.table not in (0, have.table):
        found.append(f"table {table.name}, not table {asked.table}")
    chains = have.stripe or len(table.chains)
    if asked.stripe >= 0 and chains != (asked.stripe or len(table.chains)):
        found.append(f"a stripe of {chains} chains, not {asked.stripe}")
    return found


class Handle:
    """One open of one space."""

    def __init__(self, client: Client, path: str, *, write: bool) -> None:
        """`create` and `open` make one."""
        self.path = check_path(path)
        self.ino = 0
        self.epoch = 0
        self.geometry = Geometry(1)  # until it is open
        self.identity = b""
        self.generation = 0
        self._client = client
        self._write = write
        self._lock = threading.Lock()
        self._core: Core | None = None
        self._session: Session | None = None
        self._placement: Placement | None = None
        self._capability = 0
        self._closed = False
        self._ttl_ms = 0
        self._stamp_until_s = 0.0  # time.monotonic()

    @classmethod
    def create(
        cls,
        client: Client,
        path: str,
        geometry: Geometry,
        *,
        table: str | int | None,
        stripe: int | None = None,
        quota_bytes: int | None = None,
        ttl_s: float | None = None,
        evictable: bool | None = None,
        dedup: bool | None = None,
        exist_ok: bool,
        permissions: int,
        identity: bytes = b"",
    ) -> Handle:
        """Makes the space and opens it. Blocking. What is None a space that exists has as it likes; a new one
        gets no quota, no ttl, is evictable, doesn't deduplicate. Exists: it is there, otherwise than asked
        for."""
        bounds = Bounds(
            quota_bytes=quota_bytes or 0,
            ttl_s=ttl_s or 0,
            evictable=evictable is not False,
            dedup=bool(dedup),
        )
        core = client.core
        check_layout_options(None, stripe)
        layout = None
        if table is not None or stripe is not None:
            layout = meta.LayoutChoice(
                table=0 if table is None else core.routing.table_id(table),
                stripe=-1 if stripe is None else stripe,
            )
        request = meta.KvCreate(
            path=wire_path(path),
            params=bounds.params(geometry, identity),
            mode=permissions & 0o7777 & ~core.umask,
            layout=layout,
            exist_ok=exist_ok,
        )
        handle = cls(client, path, write=True)
        session, opened = core.change_under_session(request, meta.KvOpened)
        handle._adopt(core, session, opened)
        if opened.created or opened.attributes.kv is None or opened.attributes.layout is None:
            return handle
        wrong = _otherwise(core, opened.attributes.layout, layout)
        wrong += differences(opened.attributes.kv, quota_bytes, ttl_s, evictable, dedup)
        if not wrong:
            return handle
        handle.close()
        raise Exists(
            f"the space exists, with {', '.join(wrong)}: leave that out, or change bounds (ffs space set, "
            "Space.set_bounds)",
            path,
        )

    @classmethod
    def open(cls, client: Client, path: str, *, write: bool) -> Handle:
        """Opens the space. Blocking."""
        handle = cls(client, path, write=write)
        handle._ask(client.core)
        return handle

    def _ask(self, core: Core) -> None:
        request = meta.KvOpen(path=wire_path(self.path), write=self._write)
        session, opened = core.change_under_session(request, meta.KvOpened)
        if self.ino not in (0, opened.ino):
            raise StaleEpoch("was removed and made anew since it was opened: open it again", self.path)
        self._adopt(core, session, opened)

    def _adopt(self, core: Core, session: Session, opened: meta.KvOpened) -> None:
        attributes = opened.attributes
        if attributes.kv is None or attributes.layout is None:
            raise InvalidArgument("isn't a KV space: make one with Space.create", self.path)
        self._placement = core.routing.placement(attributes.layout)
        self.ino = opened.ino
        self.epoch = attributes.epoch
        self.geometry = Geometry(attributes.kv.block_bytes, attributes.kv.parts)
        self.identity = attributes.kv.identity
        self.note_ttl(attributes.kv.ttl_ms)
        rights = RIGHT_READ | (RIGHT_WRITE if self._write else 0)
        self._capability = session.add_capability(
            opened.ino, 0, rights, opened.capability, opened.capability_expiry_ms, opened.ticket
        )
        self._core, self._session = core, session
        self.generation += 1

    def _live(self) -> Session:
        if self._closed:
            raise BadHandle("the space is closed: open it again", self.path)
        core = self._client.core
        session = self._session
        if session is not None and self._core is core and not session.over:
            return session
        with self._lock:
            if self._session is None or self._core is not core or self._session.over:
                self._ask(core)
            if self._session is None:
                raise Fenced("the client session is over: connect again", self.path)
            return self._session

    @property
    def client(self) -> Client:
        """Whose space it is."""
        return self._client

    @property
    def native(self) -> NativeClient:
        """The native client of this process's session. Opens the space again if need be."""
        return self._live().native

    @property
    def request_timeout_s(self) -> float:
        """What a call has where nothing else is said."""
        return self._client.core.options.request_timeout_s

    @property
    def capability(self) -> int:
        """Native's id of the capability. Opens the space again if need be."""
        self._live()
        return self._capability

    @property
    def placement(self) -> Placement:
        """Which chain has which block."""
        if self._placement is None:
            raise BadHandle("the space was never opened", self.path)
        return self._placement

    def note_ttl(self, ttl_ms: int) -> None:
        """The space's time to live, as the metadata service said just now; 0: none."""
        self._ttl_ms = ttl_ms
        self._stamp_until_s = time.monotonic() + _SERVERS_KNOW_S

    def expiry_ms(self) -> int:
        """Of a block that is put now, in manager time; 0: its servers give it one, if any. They do so by
        what they know of the space, which may take seconds to reach them."""
        if not self._ttl_ms or time.monotonic() >= self._stamp_until_s:
            return 0
        return self._live().manager_ms() + self._ttl_ms

    def want_routing(self) -> None:
        """Requests wait for newer routing. Returns at once."""
        session = self._session
        if session is not None:
            session.want_routing()

    def describe_chain(self, chain: int) -> str:
        """A chain's members and their states, as far as is known here."""
        return self._client.describe_chain(chain)

    def describe_target(self, target: int) -> str:
        """A target's server and its address, as far as is known here."""
        return self._client.describe_target(target)

    def renew(self) -> None:
        """Renews the capability, in one attempt. Blocking; raises if it is refused."""
        self.epoch = self._live().renew_capability(self._capability, once=True)

    def close(self) -> None:
        """Gives the capability back. Repeatable."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None and not session.over:
            session.drop_capability(self._capability)
