"""At most once for requests: (client, slot) -> (sequence, outcome), written with the operation itself.

docs/metadata.md, Retries."""

from __future__ import annotations

from typing import Final

import msgspec

from ffs import errors
from ffs.proto import meta
from ffs.proto.common import ErrorReply, Message
from ffs.proto.records import RetrySlot
from metadata.fs.schema import decode_slot, encode, session_key, slot_key, slot_page_key
from metadata.kv.contract import Transaction

_decode_reply: Final = msgspec.msgpack.Decoder(meta.REPLIES).decode
_decode_page: Final = msgspec.msgpack.Decoder(list[meta.REPLIES]).decode


# Client side: ffs.client.retry.kind_of. DeviceFailed: nothing can be noted any more.
_SENT_AGAIN: Final = (
    errors.Overloaded,
    errors.OutcomeUnknown,
    errors.DeadlineExceeded,
    errors.ShutDown,
    errors.ConnectionLost,
    errors.Unreachable,
    errors.NotPrimary,
    errors.Fenced,
    errors.DeviceFailed,
)


def check_identity(req: meta.Request) -> None:
    """Raises InvalidArgument for an identity that can't be."""
    if req.client == 0:
        raise errors.InvalidArgument("a request that changes something needs a client session")
    if not 0 <= req.slot < meta.MAX_SLOTS:
        raise errors.InvalidArgument(f"slot {req.slot}: there are 0 to {meta.MAX_SLOTS - 1}")
    if not 0 < req.sequence < 1 << 40:
        raise errors.InvalidArgument(f"sequence {req.sequence}: begin at 1")


async def _slot(txn: Transaction, req: meta.Request) -> RetrySlot | None:
    """The slot's record. Fenced if the session is over, InvalidArgument if the slot has moved on."""
    if await txn.get(session_key(req.client)) is None:
        raise errors.Fenced(f"client session {req.client} is over: connect again")
    data = await txn.get(slot_key(req.client, req.slot))
    if data is None:
        return None
    record = decode_slot(data)
    if record.sequence > req.sequence:
        raise errors.InvalidArgument(
            f"slot {req.slot} is at sequence {record.sequence}: {req.sequence} was given up"
        )
    return record


async def first_answer(txn: Transaction, req: meta.Request) -> Message | None:
    """What this very request was answered already, None if it's new."""
    record = await _slot(txn, req)
    if record is None:
        return None
    if record.sequence == req.sequence:
        if record.done:
            raise _reused(req)
        reply: Message = _decode_reply(record.reply)
        if type(reply) not in (meta.REPLY_OF[type(req)], ErrorReply):
            raise _reused(req)
        return reply
    _forget_pages(txn, req, record)
    return None


def stands(error: errors.FfsError) -> bool:
    """Is the error an answer that the asker goes on with? Others it sends again under the same identity."""
    return not isinstance(error, _SENT_AGAIN)


def note(txn: Transaction, req: meta.Request, reply: Message) -> None:
    """Writes the outcome down."""
    txn.set(slot_key(req.client, req.slot), encode(RetrySlot(1, req.sequence, encode(reply))))


async def first_page(txn: Transaction, req: meta.Request, page: int) -> list[Message] | None:
    """Of a batch: what its page `page` was answered already, None if the page is new."""
    record = await _slot(txn, req)
    if record is None or record.sequence < req.sequence:
        if page:
            raise errors.InvalidArgument(f"slot {req.slot}: the batch was cut off by a newer request")
        if record is not None:
            _forget_pages(txn, req, record)
        return None
    if not record.done:
        raise _reused(req)
    if page >= record.done:
        return None
    data = await txn.get(slot_page_key(req.client, req.slot, page))
    if data is None:
        raise errors.Damaged(f"page {page} of slot {req.slot} of client {req.client} is missing")
    return list(_decode_page(data))


def note_page(txn: Transaction, req: meta.Request, page: int, replies: list[Message]) -> None:
    txn.set(slot_page_key(req.client, req.slot, page), encode(replies))
    txn.set(slot_key(req.client, req.slot), encode(RetrySlot(1, req.sequence, b"", page + 1)))


def _forget_pages(txn: Transaction, req: meta.Request, record: RetrySlot) -> None:
    if record.done:
        key = slot_key(req.client, req.slot)
        txn.clear_range(key + b"\0", key + b"\xff")


def _reused(req: meta.Request) -> errors.FfsError:
    return errors.ProtocolError(f"sequence {req.sequence} of slot {req.slot} was another request")
