"""KV spaces: the two calls of Client, and the handle that ffs.kv works with. docs/client.md, KV spaces."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ffs import errors
from ffs.client.core import Core
from ffs.client.namespace import Namespace
from ffs.client.paths import PathLike, check_path, wire_path
from ffs.client.session import Session
from ffs.layout import Placement
from ffs.proto import meta, records
from ffs.proto.common import RIGHT_READ, RIGHT_REMOVE, RIGHT_WRITE

if TYPE_CHECKING:
    from ffs._native.ring import NativeClient


class KvHandle:
    """An open KV space: geometry, placement, and a capability that is kept renewed. Thread-safe.

    In a child of fork, and after the session was lost, `refresh` opens it again: ask `native` and
    `capability` anew for each ring, and compare `generation`.
    """

    def __init__(self, owner: KvCalls, path: str, write: bool) -> None:
        self._owner = owner
        self._write = write
        self._lock = threading.Lock()
        self._core: Core | None = None
        self._session: Session | None = None
        self._capability = 0
        self._placement: Placement | None = None
        self.path = path
        self.ino = 0
        """The space of its chunks."""
        self.epoch = 0
        self.params = records.KvParams(block_bytes=0)
        self.generation = 0
        """Grows when the space was opened again: rings made before are of no use."""

    def adopt(self, core: Core, session: Session, opened: meta.KvOpened) -> None:
        """Take what an open under `session` gave."""
        attributes = opened.attributes
        if attributes.kv is None or attributes.layout is None:
            raise errors.InvalidArgument("it isn't a KV space", self.path)
        self._core, self._session = core, session
        self.ino = opened.ino
        self.epoch = attributes.epoch
        self.params = attributes.kv
        self._placement = core.routing.placement(attributes.layout)
        rights = RIGHT_READ | (RIGHT_WRITE | RIGHT_REMOVE if self._write else 0)
        self._capability = session.add_capability(
            opened.ino, 0, rights, opened.capability, opened.capability_expiry_ms
        )
        self.generation += 1

    def _live(self) -> Session:
        core = self._owner.core
        session = self._session
        if session is not None and self._core is core and not session.over:
            return session
        with self._lock:
            if self._session is None or self._core is not core or self._session.over:
                self._owner._open_kv(self)
            if self._session is None:
                raise errors.Fenced("the client session is over", self.path)
            return self._session

    @property
    def native(self) -> NativeClient:
        """The native client of this process's session. Opens the space again if need be."""
        return self._live().native

    @property
    def capability(self) -> int:
        """Native's id of the capability. Opens the space again if need be."""
        self._live()
        return self._capability

    @property
    def placement(self) -> Placement:
        """Which chain has which block."""
        if self._placement is None:
            raise errors.BadHandle("the KV space is closed", self.path)
        return self._placement

    def refresh_routing(self) -> bool:
        """Fetch newer routing, in one attempt; False if none came. For WAIT_NEEDS_ROUTING."""
        return self._live().refresh_routing()

    def renew(self) -> None:
        """Renew the capability now. For WAIT_NEEDS_CAPABILITY; raises if it is refused."""
        session = self._live()
        self.epoch = session.renew_capability(self._capability)

    def close(self) -> None:
        """Give the capability back. Repeatable."""
        session, self._session = self._session, None
        if session is not None and not session.over:
            session.drop_capability(self._capability)


class KvCalls(Namespace):
    """Mixed into Client."""

    def create_kv_space(
        self,
        path: PathLike,
        block_bytes: int,
        *,
        parts: int = 1,
        quota_bytes: int = 0,
        ttl_ms: int = 0,
        identity: bytes = b"",
        evictable: bool = False,
        permissions: int = 0o666,
        table: str | int | None = None,
        stripe: int | None = None,
        exist_ok: bool = False,
    ) -> KvHandle:
        """Make a KV space at `path` and open it for reading and writing. Blocking.

        block_bytes: of the largest block, at most 16 MiB. parts: equal ranges of a block that are
        read by themselves. quota_bytes: over all chains, 0 for none. ttl_ms: 0 for none. identity:
        hash of model and layout that all users must agree on. With exist_ok, an existing space of
        equal geometry is opened. Raises Exists, InvalidArgument.
        """
        if not 0 < block_bytes <= 16 << 20:
            raise errors.InvalidArgument(
                f"block of {block_bytes} bytes: give 1 to {16 << 20}", check_path(path)
            )
        params = records.KvParams(
            block_bytes=block_bytes,
            parts=parts,
            quota_bytes=quota_bytes,
            ttl_ms=ttl_ms,
            identity=identity,
            flags=records.KV_EVICTABLE if evictable else 0,
        )
        core = self.core
        request = meta.KvCreate(
            path=wire_path(path),
            params=params,
            mode=permissions & 0o7777 & ~core.umask,
            layout=self._layout_choice(table, None, stripe),
            exist_ok=exist_ok,
        )
        session, opened = core.change_under_session(request, meta.KvOpened)
        handle = KvHandle(self, check_path(path), True)
        handle.adopt(core, session, opened)
        return handle

    def open_kv_space(self, path: PathLike, *, write: bool = True) -> KvHandle:
        """Open a KV space. Blocking. Raises NotFound, AccessDenied, InvalidArgument (it isn't one)."""
        handle = KvHandle(self, check_path(path), write)
        self._open_kv(handle)
        return handle

    def _open_kv(self, handle: KvHandle) -> None:
        core = self.core
        request = meta.KvOpen(path=wire_path(handle.path), write=handle._write)
        session, opened = core.change_under_session(request, meta.KvOpened)
        if handle.ino not in (0, opened.ino):
            raise errors.StaleEpoch("another KV space has taken its name", handle.path)
        handle.adopt(core, session, opened)
