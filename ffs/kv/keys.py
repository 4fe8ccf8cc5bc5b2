"""Keys of KV-cache blocks: a chained 256-bit hash (docs/kv_keys.md). Pure, no builtin hash().

A block's key covers everything that its content depends on: the model, how its cache is laid out, and
every token before and in the block. BLAKE3 over fields that carry their name and length, so that no two
different lists of fields have the same bytes. The same in every process and on every machine:
tests/golden/kv_keys.json pins it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import blake3
import numpy as np
import numpy.typing as npt

from ffs.errors import InvalidArgument

KEY_BYTES = 32
CHUNK_KEY_BYTES = 16  # the first half names the chunk, the second is its tag
_ROOT = "ffs 2026 kv block chain: root"
_BLOCK = "ffs 2026 kv block chain: block"
_PART = "ffs 2026 kv block chain: part"


@dataclass(frozen=True, slots=True)
class Identity:
    """What the blocks of one engine configuration have in common. Two that differ in any field never
    share a block: LoRA adapters and salts have fields of their own and can't be mistaken for another.

    `layout` names the arrangement of values in a block (engine, version, order of axes): change it
    whenever that changes.
    """

    model: str
    revision: str = ""
    layout: str = ""
    dtype: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    block_tokens: int = 16
    adapter: str = ""
    salt: str = ""


def _field(name: str, value: bytes) -> bytes:
    label = name.encode()
    return len(label).to_bytes(2, "little") + label + len(value).to_bytes(8, "little") + value


def _number(value: int) -> bytes:
    if not 0 <= value < 1 << 64:
        raise InvalidArgument(f"{value} isn't an unsigned 64-bit number")
    return value.to_bytes(8, "little")


def root_hash(identity: Identity) -> bytes:
    """The parent of a sequence's first block: 32 bytes that stand for the whole identity."""
    if identity.block_tokens < 1:
        raise InvalidArgument(f"block_tokens is {identity.block_tokens}: a block holds at least one token")
    hasher = blake3.blake3(derive_key_context=_ROOT)
    for entry in fields(identity):
        value = getattr(identity, entry.name)
        hasher.update(_field(entry.name, value.encode() if isinstance(value, str) else _number(value)))
    return hasher.digest()


def block_hash(
    parent: bytes,
    tokens: Sequence[int] | npt.NDArray[np.integer],
    extra: Mapping[str, bytes] | None = None,
) -> bytes:
    """The key of the block that holds `tokens` after `parent` (root_hash, or the key before).

    `extra`: what else the content depends on, by name, such as hashes of images within this block.
    InvalidArgument for a parent that isn't 32 bytes or tokens outside u32.
    """
    if len(parent) != KEY_BYTES:
        raise InvalidArgument(
            f"the parent is {len(parent)} bytes long: give root_hash() or a block's key (32)"
        )
    hasher = blake3.blake3(derive_key_context=_BLOCK)
    hasher.update(_field("parent", parent))
    for name in sorted(extra or ()):
        hasher.update(_field("extra." + name, (extra or {})[name]))
    hasher.update(_field("tokens", _token_bytes(tokens)))
    return hasher.digest()


def _token_bytes(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    array = np.asarray(tokens)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise InvalidArgument("tokens are a non-empty list of integers")
    if int(array.min()) < 0 or int(array.max()) >= 1 << 32:
        raise InvalidArgument("a token is outside 0 .. 2^32 - 1")
    return array.astype("<u4").tobytes()


def hash_tokens(identity: Identity, tokens: Sequence[int] | npt.NDArray[np.integer]) -> list[bytes]:
    """The keys of all whole blocks of a sequence, first to last. A part at the end has no key."""
    array = np.asarray(tokens)
    size = identity.block_tokens
    parent = root_hash(identity)
    keys = []
    for begin in range(0, len(array) - size + 1, size):
        parent = block_hash(parent, array[begin : begin + size])
        keys.append(parent)
    return keys


def part_key(key: bytes, part: int) -> bytes:
    """Under which part `part` of a block lies, in a space that cuts blocks in parts (docs/kv_keys.md,
    Parts)."""
    if len(key) != KEY_BYTES:
        raise InvalidArgument(f"the key is {len(key)} bytes long: give a block's key (32)")
    hasher = blake3.blake3(derive_key_context=_PART)
    hasher.update(_field("block", key))
    hasher.update(_field("part", _number(part)))
    return hasher.digest()


def part_keys(keys: npt.NDArray[np.uint8], parts: Sequence[int]) -> npt.NDArray[np.uint8]:
    """`part_key` of each of these parts of each key, uint8 (keys x parts, 32). A microsecond each, for blocks
    of which a part takes milliseconds to move."""
    raw = keys.tobytes()
    out = bytearray()
    for begin in range(0, len(raw), KEY_BYTES):
        key = raw[begin : begin + KEY_BYTES]
        for part in parts:
            out += part_key(key, part)
    return np.frombuffer(out, dtype=np.uint8).reshape(-1, KEY_BYTES)


def key_array(keys: Iterable[bytes] | npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Keys as uint8 (n, 32). Takes a list of 32-byte strings or such an array as it is.

    InvalidArgument names the first key of another length."""
    if isinstance(keys, np.ndarray):
        if keys.ndim != 2 or keys.shape[1] != KEY_BYTES or keys.dtype != np.uint8:
            raise InvalidArgument(
                f"keys as an array are uint8 of shape (n, 32), not {keys.dtype} {keys.shape}"
            )
        return np.ascontiguousarray(keys)
    listed = list(keys)
    for position, key in enumerate(listed):
        if not isinstance(key, bytes | bytearray | memoryview) or len(key) != KEY_BYTES:
            shown = len(key) if isinstance(key, bytes | bytearray | memoryview) else type(key).__name__
            raise InvalidArgument(f"key {position} isn't 32 bytes long ({shown}): see ffs.kv.block_hash")
    return np.frombuffer(b"".join(listed), dtype=np.uint8).reshape(len(listed), KEY_BYTES)
