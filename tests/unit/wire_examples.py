"""The values of the example frames, which docs/wire_format.md shows and tests/golden/wire/ holds."""

from __future__ import annotations

import hashlib
import hmac

from wire_layouts import CAPABILITY, HEADER, LAYOUTS, VARIABLE, Value, crc32c, encode_field, size_of

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


RDMA_END: dict[str, Value] = {
    "queue_pair": 17,
    "first_packet": 0x123456,
    "gid": "00" * 10 + "ffff" + "0a630001",
    "mtu": 5,
    "ethernet": 1,
    "reads_in": 16,
    "reads_out": 16,
    "receives": 32,
    "message_bytes": 8192,
}

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
    "rdma_open": RDMA_END,
    "rdma_open_reply": RDMA_END,
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
