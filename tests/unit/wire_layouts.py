"""The layouts of docs/wire_format.md's frames, known from its prose only, and the bytes of their fields."""

from __future__ import annotations

import struct

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
RDMA_END = [
    ("queue_pair", "u32"),
    ("first_packet", "u32"),
    ("gid", "b16"),
    ("lid", "u16"),
    ("mtu", "u8"),
    ("ethernet", "u8"),
    ("reads_in", "u8"),
    ("reads_out", "u8"),
    ("reserved", "b2"),
    ("receives", "u32"),
    ("message_bytes", "u32"),
]
# type number, fixed part
LAYOUTS: dict[str, tuple[int, list[tuple[str, str]]]] = {
    "hello": (1, HELLO),
    "hello_reply": (2, HELLO_REPLY),
    "server_hello": (1, [*HELLO, ("nonce", "b32")]),
    "server_hello_reply": (2, [*HELLO_REPLY, ("nonce", "b32"), ("proof", "b32")]),
    "peer_proof": (12, [("proof", "b32")]),
    "rdma_open": (13, RDMA_END),
    "rdma_open_reply": (14, [("status", "u32"), ("detail", "u32"), *RDMA_END]),
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
