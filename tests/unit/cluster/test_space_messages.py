"""Messages of space policies and roles as bytes: golden vectors read by package msgpack as the independent
peer; what the version before sends and understands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from ffs.proto import cluster as proto
from ffs.proto.commands import ForgetNode, GetSpaces
from ffs.proto.spaces import SpaceConfig, SpacePolicy, SpaceUse
from ffs.rpc import codec

GOLDEN = Path(__file__).parents[2] / "golden" / "control" / "spaces.json"

POLICY = SpacePolicy(space=2**40, chain=7, quota_bytes=2**41, ttl_ms=43_200_000, flags=1)
USE = SpaceUse(
    target=9,
    space=2**40,
    chunks=3,
    bytes=12288,
    evicted_chunks=1,
    evicted_bytes=4096,
    hits=5,
    expired_chunks=2,
)
MESSAGES: dict[str, Any] = {
    "heartbeat": proto.Heartbeat(
        node=1, incarnation=2, config=(3, 4), reports=(), sequence=5, spaces=(3, 8), space_use=(USE,)
    ),
    "heartbeat-reply": proto.HeartbeatReply(
        manager_ms=1,
        next_ms=2,
        term=3,
        spaces=SpaceConfig(revision=(3, 9), policies=(POLICY,)),
    ),
    "wait-config": proto.WaitConfig(node=1, incarnation=2, config=(3, 4), wait_ms=1500, spaces=(3, 8)),
    "wait-config-reply": proto.WaitConfigReply(term=3, spaces=SpaceConfig(revision=(3, 9), policies=())),
    "register-node": proto.RegisterNode(
        name="n",
        uuid=b"u" * 16,
        host_id="h",
        devices=(proto.DeviceInfo(uuid=b"d" * 16, path="/d", size_bytes=1, targets=(1, 2), role="kv"),),
    ),
    "create-table": proto.CreateTable(name="kv", replicas=1, role="kv"),
    "get-spaces": GetSpaces(space=2**40),
    "forget-node": ForgetNode(node="n3"),
}
# Fields that were appended since the golden bytes were made.
SINCE = {"heartbeat": 1, "heartbeat-reply": 1, "wait-config": 1, "wait-config-reply": 1}


@pytest.mark.parametrize("name", list(MESSAGES))
def test_golden_bytes(name: str) -> None:
    golden = bytes.fromhex(json.loads(GOLDEN.read_text())[name])
    said = msgpack.unpackb(golden)
    now = msgpack.unpackb(codec.encode_message(MESSAGES[name]))
    assert _begins(now[: len(said)], said)
    assert now[len(said) :] == [None] * SINCE.get(name, 0)
    assert codec.decode_message(golden) == MESSAGES[name]
    tag = MESSAGES[name].__struct_config__.tag
    assert msgpack.unpackb(golden)[:2] == [tag, 1]


def _begins(now: object, said: object) -> bool:
    """Whether it is the same, but for fields that were appended to what is inside."""
    if isinstance(now, list) and isinstance(said, list):
        return len(now) >= len(said) and all(map(_begins, now, said))
    return now == said


def test_fields_of_a_policy_and_of_a_use_in_their_order() -> None:
    reply = msgpack.unpackb(codec.encode_message(MESSAGES["heartbeat-reply"]))
    assert reply[-2] == [[3, 9], [[2**40, 7, 2**41, 43_200_000, 1]]]
    beat = msgpack.unpackb(codec.encode_message(MESSAGES["heartbeat"]))
    assert beat[-3:-1] == [[3, 8], [[9, 2**40, 3, 12288, 1, 4096, 5, 2, 0, 0]]]


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("heartbeat", 3, {"spaces": None, "space_use": ()}),
        ("heartbeat-reply", 2, {"spaces": None}),
        ("wait-config", 2, {"spaces": None}),
        ("wait-config-reply", 2, {"spaces": None}),
        ("create-table", 1, {"role": ""}),
    ],
)
def test_the_version_before_leaves_out_what_it_does_not_know(
    name: str, fields: int, expected: dict[str, Any]
) -> None:
    short = msgpack.packb(msgpack.unpackb(codec.encode_message(MESSAGES[name]))[:-fields])
    decoded = codec.decode_message(short)
    assert {key: getattr(decoded, key) for key in expected} == expected


def test_a_later_version_may_say_more() -> None:
    longer = [*msgpack.unpackb(codec.encode_message(MESSAGES["heartbeat-reply"])), "more"]
    longer[-3][1][0].append("and of a policy")
    assert codec.decode_message(msgpack.packb(longer)) == MESSAGES["heartbeat-reply"]


def make_golden() -> None:
    """Writes the file; only for new entries, never to change one."""
    made = {name: codec.encode_message(message).hex() for name, message in MESSAGES.items()}
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    make_golden()
