"""Keys for blocks that an engine names itself (docs/kv_keys.md, Blocks of engines). Pure.

An engine's own hash covers tokens, adapters and salts; what else the bytes of a block depend on is a
*namespace*: fields by name, hashed once. A block's key covers namespace, the engine's name of the block, the
part of it, and how many bytes that has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import blake3
import numpy as np
import numpy.typing as npt

from ffs.errors import InvalidArgument
from ffs.kv.keys import KEY_BYTES

_NAMESPACE = "ffs 2026 kv engine: namespace"
_BLOCK = "ffs 2026 kv engine: block"

Value = str | bytes | int | bool


def _field(name: str, value: bytes) -> bytes:
    label = name.encode()
    return len(label).to_bytes(2, "little") + label + len(value).to_bytes(8, "little") + value


def _encoded(name: str, value: Value) -> bytes:
    """With its type before it: the text "1" and the number 1 are two values."""
    if isinstance(value, str):
        return b"s" + value.encode()
    if isinstance(value, bytes):
        return b"b" + value
    if not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise InvalidArgument(f"field {name} is {value!r}: give text, bytes or a number from 0 to 2^64 - 1")
    return b"u" + int(value).to_bytes(8, "little")


def namespace(engine: str, fields: Mapping[str, Value]) -> bytes:
    """32 bytes that stand for everything an engine's blocks have in common. Fields by name, in any order."""
    hasher = blake3.blake3(derive_key_context=_NAMESPACE)
    hasher.update(_field("engine", engine.encode()))
    for name in sorted(fields):
        hasher.update(_field("field." + name, _encoded(name, fields[name])))
    return hasher.digest()


def block_keys(
    root: bytes, names: Sequence[bytes], part_bytes: Sequence[int] | npt.NDArray[np.integer]
) -> npt.NDArray[np.uint8]:
    """Keys as uint8 (names x parts, 32), in the order of name, then part.

    `root`: of `namespace`. `part_bytes`: how many bytes each part has, the same for all names."""
    if len(root) != KEY_BYTES:
        raise InvalidArgument(f"a namespace has {KEY_BYTES} bytes, not {len(root)}")
    before = _field("namespace", root) + _field("block", b"")[:-8]
    after = [
        _field("part", part.to_bytes(8, "little")) + _field("bytes", int(size).to_bytes(8, "little"))
        for part, size in enumerate(part_bytes)
    ]
    # Calls into C alone for each block: hundreds of thousands of them a second.
    joined = b"".join(
        [
            blake3.blake3(
                before + len(name).to_bytes(8, "little") + name + end, derive_key_context=_BLOCK
            ).digest()
            for name in names
            for end in after
        ]
    )
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(names) * len(after), KEY_BYTES)
