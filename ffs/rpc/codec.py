"""Bodies: one encoder and one decoder for every message of ffs.proto. docs/control_plane.md, Messages.

A message is a msgpack array [tag, v, fields ...]; tags are unique over all messages, so a body
says itself what it is, and one decoder over the union of all serves both sides. Thread-safe
(msgspec's decoder keeps no state between calls); never blocks.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, cast

import msgspec

from ffs.errors import ProtocolError
from ffs.proto import (
    auth,
    chain_calls,
    checks,
    cluster,
    commands,
    common,
    locking,
    meta,
    quota,
    xattrs,
)
from ffs.proto.common import ErrorReply, Message
from ffs.rpc.frame import REPLY, encode_frame

MODULES = (common, meta, quota, locking, xattrs, checks, auth, cluster, commands, chain_calls)


def message_classes() -> list[type[Message]]:
    """Every message class that has a tag, by tag."""
    found: dict[int, type[Message]] = {}
    for module in MODULES:
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, Message)
                and value.__struct_config__.tag is not None
            ):
                found[cast(int, value.__struct_config__.tag)] = value
    return [found[tag] for tag in sorted(found)]


_union: Any = functools.reduce(operator.or_, message_classes())
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_union)
_encoder = msgspec.msgpack.Encoder()

encode_message = _encoder.encode


def decode_message(body: bytes) -> Message:
    """The message of a body. Raises ProtocolError naming what is wrong with it."""
    try:
        return cast(Message, _decoder.decode(body))
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a control message can't be understood: {error}") from None


def encode_reply(request_id: int, message: Message) -> bytes:
    """The frame of a reply; one that is over the bound becomes the error that says so."""
    try:
        return encode_frame(REPLY, request_id, encode_message(message))
    except ProtocolError as error:
        return encode_frame(REPLY, request_id, encode_message(common.error_reply(error)))


def result_of(body: bytes) -> Message:
    """The reply in a body, or raises the error that the peer sent."""
    message = decode_message(body)
    if type(message) is ErrorReply:
        raise common.to_error(message)
    return message
