"""Frames of the control plane: golden bytes, cutting, and what no peer sends."""

from __future__ import annotations

import json
import random
import struct
import zlib
from pathlib import Path

import msgpack
import pytest

from ffs.errors import NotFound, ProtocolError
from ffs.proto import cluster, common, meta
from ffs.rpc import codec, frame

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "control" / "frames.json").read_text(encoding="utf-8")
)


def peer_frame(kind: int, request_id: int, body: bytes) -> bytes:
    """The frame as docs/control_plane.md says it, by other means than the code under test."""
    head = struct.pack("<4sBBHQI", b"FFR1", 1, kind, 0, request_id, len(body))
    return head + struct.pack("<I", zlib.crc32(head + body)) + body


@pytest.mark.parametrize("case", GOLDEN["frames"], ids=lambda case: f"kind{case['kind']}")
def test_golden_frames(case: dict[str, str | int]) -> None:
    body = bytes.fromhex(str(case["body"]))
    made = frame.encode_frame(int(case["kind"]), int(case["request_id"]), body)
    assert made.hex() == case["frame"]
    assert made == peer_frame(int(case["kind"]), int(case["request_id"]), body)
    assert frame.FrameDecoder().feed(made) == [(case["kind"], case["request_id"], body)]


def test_golden_bodies_are_what_the_codec_makes() -> None:
    assert codec.encode_message(cluster.Ping(payload=b"hi")).hex() == GOLDEN["frames"][0]["body"]
    assert codec.encode_message(common.OkReply()).hex() == GOLDEN["frames"][1]["body"]


def test_messages_are_plain_msgpack() -> None:
    body = codec.encode_message(common.Hello(name="me", nonce=b"n"))
    assert msgpack.unpackb(body) == [1, 1, 1, 1, b"", "client", 0, 0, b"", "me", b"n"]


def test_any_cut_gives_the_same_frames() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    frames = [
        (rng.choice((1, 2, 3)), rng.getrandbits(64), rng.randbytes(rng.choice((0, 1, 30, 5000))))
        for _ in range(200)
    ]
    stream = b"".join(frame.encode_frame(*each) for each in frames)
    for _ in range(20):
        decoder = frame.FrameDecoder()
        found = []
        at = 0
        while at < len(stream):
            size = rng.choice((1, 3, 23, 24, 25, 1000, 100_000))
            found += decoder.feed(stream[at : at + size])
            at += size
        assert found == frames
        assert decoder.pending_bytes == 0


def test_every_flipped_bit_is_noticed() -> None:
    whole = frame.encode_frame(1, 99, b"body of a message")
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << (bit % 8)
        decoder = frame.FrameDecoder()
        try:
            found = decoder.feed(bytes(damaged))
        except ProtocolError:
            continue
        # A longer length only makes it wait for more: the CRC covers what follows.
        assert found == []
        assert 16 <= bit // 8 < 20


def test_bounds() -> None:
    with pytest.raises(ProtocolError, match="over the bound"):
        frame.encode_frame(1, 1, bytes(frame.MAX_BODY_BYTES + 1))
    head = struct.pack("<4sBBHQI", b"FFR1", 1, 1, 0, 1, frame.MAX_BODY_BYTES + 1)
    with pytest.raises(ProtocolError, match="the bound is"):
        frame.FrameDecoder().feed(head + bytes(4))
    with pytest.raises(ProtocolError, match="not ffs's control protocol"):
        frame.FrameDecoder().feed(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def test_decoders_survive_anything() -> None:
    """Bodies made by chance, and valid ones with a few bytes changed: understood or ProtocolError."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    samples = [
        codec.encode_message(meta.Stat(path=b"/a/b")),
        codec.encode_message(cluster.GetRouting(known_epoch=2**63, wait_ms=5)),
        codec.encode_message(
            cluster.Heartbeat(node=1, incarnation=2, config=(1, 2), reports=(), fenced=(1, 2**64 - 1))
        ),
    ]
    for _ in range(20_000):
        if rng.random() < 0.3:
            body = rng.randbytes(rng.randrange(60))
        else:
            changed = bytearray(rng.choice(samples))
            for _ in range(rng.randrange(1, 4)):
                changed[rng.randrange(len(changed))] = rng.getrandbits(8)
            body = bytes(changed[: rng.randrange(len(changed) + 1)])
        try:
            message = codec.decode_message(body)
        except ProtocolError:
            continue
        assert isinstance(message, common.Message)


def test_tags_are_unique_and_in_their_ranges() -> None:
    for kind in codec.message_classes():
        tag = kind.__struct_config__.tag
        home = kind.__module__.rpartition(".")[2]
        ranges = {
            "common": (0, 10),
            "meta": (10, 100),
            "quota": (48, 97),
            "xattrs": (64, 70),
            "locking": (70, 75),
            "checks": (92, 96),
            "auth": (80, 90),
            "cluster": (100, 150),
            "commands": (120, 140),
            "chain_calls": (150, 180),
        }
        low, high = ranges[home]
        assert low <= tag < high, kind
        assert codec.message_classes().count(kind) == 1


def test_errors_travel_as_their_class() -> None:
    sent = NotFound("gone", "/a", "/b")
    body = codec.encode_message(common.error_reply(sent))
    with pytest.raises(NotFound) as caught:
        codec.result_of(body)
    assert (caught.value.errno, caught.value.filename, caught.value.filename2) == (2, "/a", "/b")


def test_a_reply_over_the_bound_becomes_an_error() -> None:
    made = codec.encode_reply(5, cluster.Ping(payload=bytes(frame.MAX_BODY_BYTES)))
    ((_, request_id, body),) = frame.FrameDecoder().feed(made)
    assert request_id == 5
    with pytest.raises(ProtocolError, match="over the bound"):
        codec.result_of(body)
