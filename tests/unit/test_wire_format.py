"""The frames of docs/wire_format.md, decoded by an independent reader.

`tests/golden/wire/<frame>.hex` holds one frame each: a line a field (`name type value: bytes`), in
order. This file knows the layouts from the prose only; native/test/net_golden.cc builds the same
frames from wire.h and compares bytes. After a deliberate change of the format run

    python tests/unit/test_wire_format.py --write

and read the difference before committing it.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "wire"
DOC = ROOT / "docs" / "wire_format.md"

CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
Value = int | str  # str: raw bytes in hex


def crc32c(data: bytes) -> int:
    """CRC32C (Castagnoli) bit by bit: slow, and nobody else's code."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def encode_field(kind: str, value: Value) -> bytes:
    if kind.startswith("b"):  # bN: N raw bytes
        raw = bytes.fromhex(str(value))
        assert len(raw) == int(kind[1:]), (kind, value)
        return raw
    assert isinstance(value, int)
    return struct.pack("<" + CODES[kind], value)


def decode_field(kind: str, raw: bytes) -> Value:
    if kind.startswith("b"):
        return raw.hex()
    value: int = struct.unpack("<" + CODES[kind], raw)[0]
    return value


def size_of(kind: str) -> int:
    return int(kind[1:]) if kind.startswith("b") else struct.calcsize(CODES[kind])


HEADER = [
    ("magic", "u32"),
    ("version", "u8"),
    ("type", "u8"),
    ("flags", "u16"),
    ("fixed_bytes", "u32"),
    ("var_bytes", "u32"),
    ("payload_bytes", "u32"),
    ("frame_crc", "u32"),
    ("request_id", "u64"),
]
VERSION = [("term", "u32"), ("counter", "u32"), ("update", "u64")]
BULK = [("kind", "u8"), ("reserved", "b3"), ("length", "u32"), ("region", "u64"), ("address", "u64")]
CONTEXT = [
    ("target", "u64"),
    ("chain", "u32"),
    ("capability", "u32"),
    ("chain_term", "u32"),
    ("chain_counter", "u32"),
    ("client", "u64"),
    ("sequence", "u64"),
    ("channel", "u32"),
    ("deadline_ms", "u32"),
    ("space_epoch", "u64"),
    ("trace_id", "u64"),
    ("routing_epoch", "u64"),
    ("priority", "u8"),
    ("checksum_kind", "u8"),
    ("reserved", "b6"),
]
STATUS = [("status", "u32"), ("detail", "u32"), ("value", "u64")]


def nest(prefix: str, fields: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(f"{prefix}.{name}", kind) for name, kind in fields]


UPDATE = [
    *nest("context", CONTEXT),
    ("key", "b24"),
    ("kind", "u8"),
    ("codec", "u8"),
    ("tag_bytes", "u8"),
    ("role", "u8"),
    ("flags", "u32"),
    ("offset", "u32"),
    ("length", "u32"),
    ("logical_length", "u32"),
    ("reserved", "u32"),
    ("expiry_ms", "u64"),
    ("tag", "b16"),
    *nest("bulk", BULK),
]
HELLO = [
    ("cluster", "b16"),
    ("client", "u64"),
    ("node", "u64"),
    ("incarnation", "u64"),
    ("features", "u64"),
    ("role", "u8"),
    ("version_min", "u8"),
    ("version_max", "u8"),
    ("reserved", "b5"),
]
HELLO_REPLY = [
    ("status", "u32"),
    ("detail", "u32"),
    ("cluster", "b16"),
    ("node", "u64"),
    ("incarnation", "u64"),
    ("features", "u64"),
    ("routing_epoch", "u64"),
    ("max_payload_bytes", "u32"),
    ("version", "u8"),
    ("reserved", "b3"),
]
# type number, fixed part
LAYOUTS: dict[str, tuple[int, list[tuple[str, str]]]] = {
    "hello": (1, HELLO),
    "hello_reply": (2, HELLO_REPLY),
    "server_hello": (1, [*HELLO, ("nonce", "b32")]),
    "server_hello_reply": (2, [*HELLO_REPLY, ("nonce", "b32"), ("proof", "b32")]),
    "peer_proof": (12, [("proof", "b32")]),
    "open_capability": (3, [("handle", "u32"), ("reserved", "u32")]),
    "open_signed_capability": (3, [("handle", "u32"), ("reserved", "u32")]),
    "open_capability_reply": (4, STATUS),
    "close_capability": (5, [("handle", "u32"), ("reserved", "u32")]),
    "register_region": (
        6,
        [("region", "u64"), ("size", "u64"), ("offset", "u64"), ("flags", "u32"), ("reserved", "u32")],
    ),
    "register_region_reply": (7, STATUS),
    "unregister_region": (8, [("region", "u64")]),
    "unregister_region_reply": (9, STATUS),
    "ping": (10, STATUS),
    "pong": (11, STATUS),
    "read": (
        16,
        [
            *nest("context", CONTEXT),
            ("key", "b24"),
            ("offset", "u32"),
            ("length", "u32"),
            ("flags", "u32"),
            ("tag_bytes", "u32"),
            ("tag", "b16"),
            *nest("bulk", BULK),
        ],
    ),
    "read_reply": (
        17,
        [
            ("status", "u32"),
            ("detail", "u32"),
            *nest("version", VERSION),
            *nest("chain", VERSION),
            ("expiry_ms", "u64"),
            ("routing_epoch", "u64"),
            ("bytes", "u32"),
            ("chunk_length", "u32"),
            ("logical_length", "u32"),
            ("first_granule", "u32"),
            ("checksum_kind", "u8"),
            ("codec", "u8"),
            ("tag_bytes", "u8"),
            ("chunk_flags", "u8"),
            ("retry_after_ms", "u32"),
            ("tag", "b16"),
            *nest("bulk", BULK),
            ("granule_count", "u32"),
            ("patch_count", "u32"),
        ],
    ),
    "update": (18, UPDATE),
    "update_reply": (
        19,
        [
            ("status", "u32"),
            ("detail", "u32"),
            *nest("version", VERSION),
            *nest("chain", VERSION),
            ("value", "u64"),
            ("routing_epoch", "u64"),
            ("retry_after_ms", "u32"),
            ("chunk_length", "u32"),
        ],
    ),
    "read_many": (
        26,
        [*nest("context", CONTEXT), ("count", "u32"), ("flags", "u32"), ("region", "u64")],
    ),
    "read_many_reply": (27, [("routing_epoch", "u64"), ("count", "u32"), ("reserved", "u32")]),
    "exists": (20, [*nest("context", CONTEXT), ("count", "u32"), ("flags", "u32")]),
    "exists_reply": (
        21,
        [
            ("status", "u32"),
            ("detail", "u32"),
            *nest("chain", VERSION),
            ("routing_epoch", "u64"),
            ("count", "u32"),
            ("reserved", "u32"),
        ],
    ),
    "last_chunk": (22, [*nest("context", CONTEXT), ("space", "u64")]),
    "last_chunk_reply": (
        23,
        [
            ("status", "u32"),
            ("detail", "u32"),
            ("key", "b24"),
            ("length", "u32"),
            ("reserved", "u32"),
            ("chunks", "u64"),
        ],
    ),
    "list_chunks": (24, [*nest("context", CONTEXT), ("key", "b24"), ("count", "u32"), ("flags", "u32")]),
    "list_chunks_reply": (
        25,
        [
            ("status", "u32"),
            ("detail", "u32"),
            *nest("chain", VERSION),
            ("routing_epoch", "u64"),
            ("count", "u32"),
            ("more", "u32"),
        ],
    ),
    "forward": (
        32,
        [
            *nest("version", VERSION),
            *nest("base", VERSION),
            *nest("floor", VERSION),
            ("from", "u64"),
            ("flags", "u32"),
            ("reserved", "u32"),
            *nest("update", UPDATE),
        ],
    ),
    "notice": (
        33,
        [
            *nest("context", CONTEXT),
            ("from", "u64"),
            ("key", "b24"),
            *nest("version", VERSION),
            *nest("other", VERSION),
            ("number", "u64"),
            ("kind", "u8"),
            ("flag", "u8"),
            ("outcome", "u16"),
            ("reserved", "u32"),
        ],
    ),
    "sync": (
        34,
        [
            *nest("context", CONTEXT),
            ("from", "u64"),
            ("message_bytes", "u32"),
            ("payload_length", "u32"),
        ],
    ),
    "used": (
        35,
        [
            *nest("context", CONTEXT),
            ("from", "u64"),
            ("lacking_bytes", "u64"),
            ("count", "u32"),
            ("flags", "u32"),
        ],
    ),
}

# Variable parts of the examples, as fields.
CAPABILITY = [
    ("version", "u8"),
    ("kind", "u8"),
    ("reserved", "u16"),
    ("rights", "u32"),
    ("client", "u64"),
    ("space", "u64"),
    ("epoch", "u64"),
    ("expiry_ms", "u64"),
    ("id", "u64"),
    ("key_id", "u32"),
    ("reserved2", "u32"),
    ("mac", "b32"),
]
VARIABLE: dict[str, list[tuple[str, str]]] = {
    "open_capability": CAPABILITY,
    "open_signed_capability": CAPABILITY,
    "read_reply": [
        ("crc[0]", "u32"),
        ("crc[1]", "u32"),
        ("patches[0].at", "u32"),
        ("patches[0].length", "u32"),
    ],
    "read_many": [
        (f"entries[{i}].{field}", kind)
        for i in range(2)
        for field, kind in (
            ("key", "b24"),
            ("offset", "u32"),
            ("length", "u32"),
            ("address", "u64"),
            ("request_id", "u64"),
        )
    ],
    "read_many_reply": [
        (f"results[{i}].{field}", kind)
        for i in range(2)
        for field, kind in (
            ("request_id", "u64"),
            ("bytes", "u32"),
            ("chunk_length", "u32"),
            ("granule", "u32"),
            ("crc", "u32"),
        )
    ],
    "update": [("crc[0]", "u32"), ("crc[1]", "u32")],
    "forward": [("crc[0]", "u32")],
    "sync": [("message", "b5"), ("crc[0]", "u32")],
    "used": [("keys[0]", "b24")],
    "exists": [
        ("keys[0].key", "b24"),
        ("keys[0].tag", "b16"),
        ("keys[0].tag_bytes", "u32"),
        ("keys[0].reserved", "u32"),
    ],
    "exists_reply": [("entries[0].state", "u32"), ("entries[0].length", "u32")],
    "list_chunks_reply": [
        ("entries[0].key", "b24"),
        ("entries[0].length", "u32"),
        ("entries[0].flags", "u32"),
    ],
}

# Inline payloads of the examples.
PAYLOAD = {"forward": b"ffs!", "read_reply": b"tail", "sync": b"ffs!"}

KEY = "0000000000000007" + "0000000000000000" + "0000000000000003"  # chunk 3 of inode 7
CLUSTER = "00112233445566778899aabbccddeeff"
CONTEXT_VALUES: dict[str, Value] = {
    "target": 0x101,
    "chain": 9,
    "capability": 1,
    "chain_term": 2,
    "chain_counter": 5,
    "client": 0xC11E,
    "sequence": 41,
    "channel": 6,
    "deadline_ms": 30000,
    "space_epoch": 1,
    "trace_id": 0x7ACE,
    "routing_epoch": 12,
    "checksum_kind": 1,
}


def within(prefix: str, values: dict[str, Value]) -> dict[str, Value]:
    return {f"{prefix}.{name}": value for name, value in values.items()}


CHUNK_VERSION: dict[str, Value] = {"term": 2, "counter": 5, "update": 77}
UPDATE_VALUES: dict[str, Value] = {
    **within("context", CONTEXT_VALUES),
    "key": KEY,
    "kind": 1,
    "offset": 65532,
    "length": 8,
    "logical_length": 65540,
    "bulk.kind": 2,
    "bulk.length": 8,
    "bulk.region": 3,
    "bulk.address": 4096,
}
SERVER_HELLO: dict[str, Value] = {
    "cluster": CLUSTER,
    "node": 5,
    "incarnation": 3,
    "role": 2,
    "version_min": 1,
    "version_max": 1,
    "nonce": "a5" * 32,
}
SERVER_HELLO_REPLY: dict[str, Value] = {
    "cluster": CLUSTER,
    "node": 4,
    "incarnation": 8,
    "routing_epoch": 12,
    "max_payload_bytes": 16777216,
    "version": 1,
    "nonce": "5a" * 32,
}
UNSIGNED: dict[str, Value] = {
    "handle": 1,
    "version": 1,
    "rights": 3,
    "client": 0xC11E,
    "space": 7,
    "epoch": 1,
    "expiry_ms": 3600000,
    "id": 21,
}
SIGNED = UNSIGNED | {"key_id": 3}
KEY_OF_EXAMPLES = b"\x01\x02\x03" + bytes(29)


def packed(fields: list[tuple[str, str]], values: dict[str, Value]) -> bytes:
    """What isn't named is zero."""
    return b"".join(
        encode_field(kind, values.get(name, "00" * size_of(kind) if kind.startswith("b") else 0))
        for name, kind in fields
    )


def mac(label: bytes, said: bytes) -> str:
    return hmac.new(KEY_OF_EXAMPLES, label + said, hashlib.sha256).hexdigest()


def peer_proof(side: str) -> str:
    """Over both frames' fixed parts but the proof."""
    hello = packed(LAYOUTS["server_hello"][1], SERVER_HELLO)
    reply = packed(LAYOUTS["server_hello_reply"][1], SERVER_HELLO_REPLY)
    return mac(b"ffs peer 1 " + side.encode() + b"\0", hello + reply[:-32])


# What isn't named is zero.
EXAMPLES: dict[str, dict[str, Value]] = {
    "hello": {"cluster": CLUSTER, "client": 0xC11E, "role": 1, "version_min": 1, "version_max": 1},
    "hello_reply": {
        "cluster": CLUSTER,
        "node": 4,
        "incarnation": 8,
        "routing_epoch": 12,
        "max_payload_bytes": 16777216,
        "version": 1,
    },
    "server_hello": SERVER_HELLO,
    "server_hello_reply": SERVER_HELLO_REPLY | {"proof": peer_proof("server")},
    "peer_proof": {"proof": peer_proof("asker")},
    "open_capability": UNSIGNED,
    "open_signed_capability": SIGNED | {"mac": mac(b"ffs capability 1\0", packed(CAPABILITY, SIGNED)[:56])},
    "open_capability_reply": {"value": 1},
    "close_capability": {"handle": 1},
    "register_region": {"region": 3, "size": 67108864},
    "register_region_reply": {"value": 1},
    "unregister_region": {"region": 3},
    "unregister_region_reply": {},
    "ping": {"value": 5},
    "pong": {"value": 5},
    "read": {
        **within("context", CONTEXT_VALUES),
        "key": KEY,
        "offset": 0,
        "length": 131072,
        "flags": 2,
        "bulk.kind": 2,
        "bulk.length": 131072,
        "bulk.region": 3,
        "bulk.address": 8192,
    },
    "read_reply": {
        **within("version", CHUNK_VERSION),
        "chain.term": 2,
        "chain.counter": 5,
        "routing_epoch": 12,
        "bytes": 131072,
        "chunk_length": 131072,
        "logical_length": 131072,
        "checksum_kind": 1,
        "bulk.kind": 2,
        "bulk.length": 131072,
        "bulk.region": 3,
        "bulk.address": 8192,
        "granule_count": 2,
        "patch_count": 1,
        "patches[0].at": 131068,
        "patches[0].length": 4,
        "crc[0]": 0x11111111,
        "crc[1]": 0x22222222,
    },
    "read_many": {
        **within("context", CONTEXT_VALUES),
        "count": 2,
        "flags": 2,
        "region": 3,
        "entries[0].key": KEY,
        "entries[0].offset": 61440,
        "entries[0].length": 4096,
        "entries[0].address": 8192,
        "entries[0].request_id": 0x100000001,
        "entries[1].key": KEY,
        "entries[1].offset": 65536,
        "entries[1].length": 4096,
        "entries[1].address": 12288,
        "entries[1].request_id": 0x100000002,
    },
    "read_many_reply": {
        "routing_epoch": 12,
        "count": 2,
        "results[0].request_id": 0x100000001,
        "results[0].bytes": 4096,
        "results[0].chunk_length": 65540,
        "results[0].granule": 0xFFFFFFFF,
        "results[1].request_id": 0x100000002,
        "results[1].bytes": 4,
        "results[1].chunk_length": 65540,
        "results[1].granule": 1,
        "results[1].crc": 0x22222222,
    },
    "update": {**UPDATE_VALUES, "crc[0]": 0x33333333, "crc[1]": 0x44444444},
    "update_reply": {
        **within("version", CHUNK_VERSION),
        "chain.term": 2,
        "chain.counter": 5,
        "routing_epoch": 12,
        "value": 8,
        "chunk_length": 65540,
    },
    "exists": {
        **within("context", CONTEXT_VALUES),
        "count": 1,
        "flags": 16,
        "keys[0].key": KEY,
        "keys[0].tag": "0f" * 16,
        "keys[0].tag_bytes": 16,
    },
    "exists_reply": {
        "chain.term": 2,
        "chain.counter": 5,
        "routing_epoch": 12,
        "count": 1,
        "entries[0].state": 1,
        "entries[0].length": 1048576,
    },
    "last_chunk": {**within("context", CONTEXT_VALUES), "space": 7},
    "last_chunk_reply": {"key": KEY, "length": 65540, "chunks": 4},
    "list_chunks": {**within("context", CONTEXT_VALUES), "key": KEY, "count": 1024, "flags": 1},
    "list_chunks_reply": {
        "chain.term": 2,
        "chain.counter": 5,
        "routing_epoch": 12,
        "count": 1,
        "more": 1,
        "entries[0].key": KEY,
        "entries[0].length": 65540,
        "entries[0].flags": 1,
    },
    "forward": {
        **within("version", CHUNK_VERSION),
        "base.term": 2,
        "base.counter": 5,
        "base.update": 76,
        "floor.term": 2,
        "floor.counter": 5,
        "floor.update": 70,
        "from": 0x100,
        "flags": 2,
        **within("update", UPDATE_VALUES),
        "update.context.capability": 0,
        "update.offset": 0,
        "update.length": 4,
        "update.bulk.kind": 1,
        "update.bulk.length": 4,
        "update.bulk.region": 0,
        "update.bulk.address": 0,
        "update.logical_length": 4,
        "crc[0]": crc32c(b"ffs!"),
    },
    "notice": {
        **within("context", CONTEXT_VALUES),
        "context.capability": 0,
        "context.deadline_ms": 0,
        "from": 0x102,
        "key": KEY,
        **within("version", CHUNK_VERSION),
        "kind": 3,
        "outcome": 11,
    },
    "sync": {
        **within("context", CONTEXT_VALUES),
        "context.capability": 0,
        "context.deadline_ms": 0,
        "from": 0x102,
        "message_bytes": 5,
        "payload_length": 4,
        "message": b"hello".hex(),
        "crc[0]": crc32c(b"ffs!"),
    },
    "used": {
        "context.target": 0x101,
        "context.chain": 9,
        **{f"context.chain_{part}": CONTEXT_VALUES[f"chain_{part}"] for part in ("term", "counter")},
        "from": 0x102,
        "lacking_bytes": 5 << 20,
        "count": 1,
        "flags": 1,
        "keys[0]": KEY,
    },
}


def build(name: str) -> list[tuple[str, str, Value]]:
    """The example frame `name` as fields (name, type, value), its checksum computed."""
    type_number, fixed = LAYOUTS[name]
    values = EXAMPLES[name]
    variable = VARIABLE.get(name, [])
    unknown = set(values) - {field for field, _ in fixed} - {field for field, _ in variable}
    assert not unknown, f"{name}: no such fields: {unknown}"
    payload = PAYLOAD.get(name, b"")

    def fill(fields: list[tuple[str, str]], source: dict[str, Value]) -> list[tuple[str, str, Value]]:
        return [(f, k, source.get(f, "00" * size_of(k) if k.startswith("b") else 0)) for f, k in fields]

    # The capability repeats no name of the fixed part, but both have "reserved": zero in each.
    body = fill(fixed, values) + fill(variable, values)
    header: dict[str, Value] = {
        "magic": 0x31534646,
        "version": 1,
        "type": type_number,
        "fixed_bytes": sum(size_of(k) for _, k in fixed),
        "var_bytes": sum(size_of(k) for _, k in variable),
        "payload_bytes": len(payload),
        "request_id": 0x1000 + type_number,
    }
    head = fill(HEADER, header)
    header["frame_crc"] = crc32c(b"".join(encode_field(k, v) for _, k, v in head + body))
    head = [(f"header.{f}", k, v) for f, k, v in fill(HEADER, header)]
    tail: list[tuple[str, str, Value]] = [("payload", f"b{len(payload)}", payload.hex())] if payload else []
    return head + body + tail


def render(fields: list[tuple[str, str, Value]]) -> str:
    lines = []
    for name, kind, value in fields:
        shown = "0x" + str(value) if isinstance(value, str) else str(value)
        lines.append(f"{name} {kind} {shown}: {encode_field(kind, value).hex()}")
    return "\n".join(lines) + "\n"


def read_golden(name: str) -> tuple[bytes, list[tuple[str, str, str]]]:
    raw = b""
    lines = []
    for line in (GOLDEN / f"{name}.hex").read_text().splitlines():
        label, _, data = line.rpartition(": ")
        field, kind, shown = label.split(" ")
        raw += bytes.fromhex(data)
        lines.append((field, kind, shown))
    return raw, lines


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_golden_frame_decodes_to_its_values(name: str) -> None:
    raw, lines = read_golden(name)
    type_number, fixed = LAYOUTS[name]
    header = dict(zip([f for f, _ in HEADER], struct.unpack_from("<IBBHIIIIQ", raw), strict=True))
    assert header["magic"] == 0x31534646
    assert header["type"] == type_number
    assert header["fixed_bytes"] == sum(size_of(k) for _, k in fixed)
    head_end = 32 + header["fixed_bytes"] + header["var_bytes"]
    assert len(raw) == head_end + header["payload_bytes"]
    zeroed = raw[:20] + bytes(4) + raw[24:head_end]
    assert crc32c(zeroed) == header["frame_crc"]

    at = 0
    layout = [(f"header.{f}", k) for f, k in HEADER] + fixed + VARIABLE.get(name, [])
    for (field, kind), (named, named_kind, shown) in zip(layout, lines, strict=False):
        assert (field, kind) == (named, named_kind)
        value = decode_field(kind, raw[at : at + size_of(kind)])
        assert (f"0x{value}" if isinstance(value, str) else str(value)) == shown, field
        at += size_of(kind)
    assert raw[at:] == PAYLOAD.get(name, b"")


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_golden_frame_is_what_the_examples_say(name: str) -> None:
    assert (GOLDEN / f"{name}.hex").read_text() == render(build(name))


def test_every_golden_file_has_a_layout() -> None:
    assert {path.stem for path in GOLDEN.glob("*.hex")} == set(LAYOUTS)


def example_block(name: str) -> str:
    """The worked example of docs/wire_format.md: fields of the golden file that aren't zero."""
    offset = 0
    lines = []
    for field, kind, value in build(name):
        raw = encode_field(kind, value)
        if any(raw):
            shown = raw.hex() if len(raw) <= 24 else raw[:24].hex() + "..."
            lines.append(
                f"{offset:4d}  {shown:<48}  {field} = {value if isinstance(value, int) else 'bytes'}"
            )
        offset += len(raw)
    return "```\n" + "\n".join(lines) + "\n```"


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_the_page_shows_the_golden_example(name: str) -> None:
    assert f"<!-- example: {name} -->\n{example_block(name)}" in DOC.read_text()


def write() -> None:
    import re

    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in LAYOUTS:
        (GOLDEN / f"{name}.hex").write_text(render(build(name)))
    text = DOC.read_text()
    for name in LAYOUTS:
        text = re.sub(
            rf"<!-- example: {name} -->\n(```\n.*?\n```)?",
            lambda _, n=name: f"<!-- example: {n} -->\n{example_block(n)}",  # type: ignore[misc]
            text,
            flags=re.S,
        )
    DOC.write_text(text)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        sys.exit("usage: test_wire_format.py --write")
