"""Users and their tokens, in the store. docs/control_plane.md, Users.

    Uu <name>        UserRecord
    Uc               counter of changes
    Us <client8>     the token under which a client session was opened

Every metadata process keeps the users in memory and looks for changes every POLL_S; the primary ends sessions
whose token is gone. One event loop.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ffs.errors import Damaged, Exists, FfsError, InvalidArgument, NotFound, NotPermitted, Unauthenticated
from ffs.proto.auth import (
    TOKEN_ID_BYTES,
    AddToken,
    ListUsers,
    RemoveUser,
    RevokeToken,
    SetUser,
    TokenView,
    UsersReply,
    UserView,
    Verifier,
)
from ffs.proto.common import Creds, Message, OkReply
from ffs.rpc.handshake import Grant
from metadata.fs.schema import session_key
from metadata.kv.contract import Snapshot, Store, Transaction, after

log = logging.getLogger("ffs.meta.users")

USERS: Final = b"Uu"
CHANGES: Final = b"Uc"
SESSIONS: Final = b"Us"
POLL_S: Final = 0.5
SWEEP_S: Final = 1.0
PAGE: Final = 500
MAX_TOKENS: Final = 64
MAX_GROUPS: Final = 256
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}")


class TokenRecord(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    id: bytes
    made_ns: int
    label: str
    verifier: Verifier


class UserRecord(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    v: int = 1
    name: str
    creds: Creds
    tokens: tuple[TokenRecord, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(UserRecord)


def _decode(data: bytes) -> UserRecord:
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise Damaged(f"a user's record can't be read: {error}") from None


def user_key(name: str) -> bytes:
    return USERS + name.encode()


def binding_key(client: int) -> bytes:
    return SESSIONS + client.to_bytes(8, "big")


@dataclass(frozen=True, slots=True)
class _Known:
    name: str
    creds: Creds
    verifier: Verifier


class Users:
    """A metadata process's view of the users, and the requests that change them."""

    REQUESTS: Final = (SetUser, ListUsers, RemoveUser, AddToken, RevokeToken)

    def __init__(self, store: Store, now_ns: Callable[[], int]) -> None:
        self._store = store
        self._now_ns = now_ns
        self._tokens: dict[bytes, _Known] = {}
        self._changes: bytes | None = None
        self._own: dict[bytes, set[int]] = {}  # token -> client sessions that were opened under it

    # --- who is there -----------------------------------------------------------------------------

    def grant(self, token: bytes) -> Grant | None:
        """For the handshake: what proves a token. None: no such token (any more)."""
        known = self._tokens.get(token)
        return None if known is None else Grant(known.name, known.verifier)

    def creds(self, token: bytes) -> Creds:
        """As whom its holder acts. Unauthenticated: it was revoked."""
        known = self._tokens.get(token)
        if known is None:
            raise Unauthenticated("this token was revoked, or its user removed")
        return known.creds

    def owns_now(self, token: bytes, client: int) -> bool:
        """Whether a session is known to be of a token: False may also mean that nobody has looked."""
        return client == 0 or client in self._own.get(token, ())

    async def check_owner(self, token: bytes, client: int) -> None:
        """NotPermitted unless the session was opened under the token."""
        if self.owns_now(token, client):
            return
        bound = await self._store.read(lambda snapshot: snapshot.get(binding_key(client)))
        if bound != token:
            raise NotPermitted(f"client session {client} isn't of this token")
        self._own.setdefault(token, set()).add(client)

    async def bind(self, token: bytes, client: int) -> None:
        """A session was opened under a token: before the client hears of it."""

        async def body(txn: Transaction) -> None:
            txn.set(binding_key(client), token)

        await self._store.run(body, urgent=True)
        self._own.setdefault(token, set()).add(client)

    async def poll(self) -> None:
        """For ever: other processes' changes are seen within POLL_S."""
        while True:
            try:
                await self.refresh()
            except FfsError as error:
                log.warning("users: %s", error)
            await asyncio.sleep(POLL_S)

    async def refresh(self) -> None:
        """Reads what has changed. Raises what the store raises, Damaged."""
        changes = await self._store.read(lambda snapshot: snapshot.get(CHANGES)) or b""
        if changes == self._changes:
            return
        records = await self._store.read(_all)
        self._tokens = {
            token.id: _Known(record.name, record.creds, token.verifier)
            for record in records
            for token in record.tokens
        }
        self._own = {token: clients for token, clients in self._own.items() if token in self._tokens}
        self._changes = changes

    # --- requests ---------------------------------------------------------------------------------

    async def handle(self, request: Message) -> Message:
        """Of REQUESTS, by an administrator. Each may be sent again."""
        if isinstance(request, ListUsers):
            records = await self._store.read(_all)
            return UsersReply(users=tuple(_view(record) for record in records))
        if isinstance(request, SetUser):
            reply = await self._store.run(lambda txn: self._set(txn, request))
        elif isinstance(request, AddToken):
            reply = await self._store.run(lambda txn: self._add_token(txn, request))
        elif isinstance(request, RevokeToken):
            reply = await self._store.run(lambda txn: self._revoke(txn, request))
        else:
            assert isinstance(request, RemoveUser), request
            reply = await self._store.run(lambda txn: self._remove(txn, request))
        await self.refresh()
        return reply

    async def _set(self, txn: Transaction, request: SetUser) -> Message:
        _check_name(request.name)
        creds = request.creds
        if not all(0 <= number < 2**32 - 1 for number in (creds.uid, creds.gid, *creds.groups)):
            raise InvalidArgument(f"user {request.name}: ids are 0 to 4294967294")
        if len(creds.groups) > MAX_GROUPS:
            raise InvalidArgument(f"user {request.name}: at most {MAX_GROUPS} groups")
        found = await txn.get(user_key(request.name))
        if found is None and request.exists:
            raise NotFound(f"there is no user {request.name}")
        if found is not None and not request.exists:
            record = _decode(found)
            if record.creds != creds:
                raise Exists(f"there is a user {request.name} already: ffs user change, or remove it first")
            return UsersReply(users=(_view(record),))
        tokens = () if found is None else _decode(found).tokens
        return self._store_user(txn, UserRecord(name=request.name, creds=creds, tokens=tokens))

    async def _add_token(self, txn: Transaction, request: AddToken) -> Message:
        if len(request.id) != TOKEN_ID_BYTES:
            raise InvalidArgument(f"a token's id has {TOKEN_ID_BYTES} bytes")
        record = await _user(txn, request.name)
        if any(token.id == request.id for token in record.tokens):
            return UsersReply(users=(_view(record),))
        if len(record.tokens) >= MAX_TOKENS:
            raise InvalidArgument(f"user {request.name} has {MAX_TOKENS} tokens already: revoke one")
        made = TokenRecord(
            id=request.id, made_ns=self._now_ns(), label=request.label[:200], verifier=request.verifier
        )
        return self._store_user(txn, replace(record, tokens=(*record.tokens, made)))

    async def _revoke(self, txn: Transaction, request: RevokeToken) -> Message:
        record = await _user(txn, request.name)
        left = tuple(token for token in record.tokens if request.id and token.id != request.id)
        if request.id and left == record.tokens:
            raise NotFound(f"user {request.name} has no token {request.id.hex()}: ffs user list")
        return self._store_user(txn, replace(record, tokens=left))

    async def _remove(self, txn: Transaction, request: RemoveUser) -> Message:
        await _user(txn, request.name)
        txn.clear(user_key(request.name))
        txn.add(CHANGES, 1)
        return OkReply()

    @staticmethod
    def _store_user(txn: Transaction, record: UserRecord) -> UsersReply:
        txn.set(user_key(record.name), _encode(record))
        txn.add(CHANGES, 1)
        return UsersReply(users=(_view(record),))


async def end_sessions_of_gone_tokens(
    store: Store, users: Users, end: Callable[[int], Awaitable[object]]
) -> None:
    """The primary's, for ever: ends (`end`) client sessions whose token was revoked, and forgets those that
    are over, within about SWEEP_S + POLL_S."""
    while True:
        await asyncio.sleep(SWEEP_S)
        try:
            await users.refresh()
            start = SESSIONS
            while start:
                page = await store.read(partial(_sessions, start=start))
                for client, token, alive in page:
                    if alive and users.grant(token) is None:
                        log.warning("client session %d ends: its token was revoked", client)
                        await end(client)
                    elif not alive:
                        await store.run(partial(_unbind, client=client))
                start = binding_key(page[-1][0] + 1) if len(page) == PAGE else b""
        except FfsError as error:
            log.warning("sessions of users: %s", error)


async def _unbind(txn: Transaction, client: int) -> None:
    txn.clear(binding_key(client))


async def _sessions(snapshot: Snapshot, start: bytes) -> list[tuple[int, bytes, bool]]:
    """(client, token, whether the session lives), from `start` on, at most PAGE."""
    pairs = await snapshot.range(start, after(SESSIONS), PAGE)
    found = []
    for key, token in pairs:
        client = int.from_bytes(key[len(SESSIONS) :], "big")
        found.append((client, token, await snapshot.get(session_key(client)) is not None))
    return found


async def _all(snapshot: Snapshot) -> list[UserRecord]:
    return [_decode(value) for _, value in await snapshot.range(USERS, after(USERS))]


async def _user(txn: Transaction, name: str) -> UserRecord:
    _check_name(name)
    found = await txn.get(user_key(name))
    if found is None:
        raise NotFound(f"there is no user {name}")
    return _decode(found)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"user {name!r}: 1 to 64 letters, digits and _ . @ -, the first no sign")


def _view(record: UserRecord) -> UserView:
    tokens = tuple(TokenView(id=t.id, made_ns=t.made_ns, label=t.label) for t in record.tokens)
    return UserView(name=record.name, creds=record.creds, tokens=tokens)
