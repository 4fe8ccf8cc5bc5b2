"""Our wire protocol over RDMA, spoken by a client that isn't ours (guest_verbs_peer.py)."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Iterator
from errno import EINVAL, ENXIO
from pathlib import Path

import pytest
from chaos_cluster import until
from guest_port import counters
from guest_verbs_peer import BULK_INLINE, GRANULE, WANT_CHECKSUMS, Answer, VerbsPeer, crc32c
from wire_layouts import Value

from ffs._native.device import device_format
from ffs._native.routes import SERVING, ChainRoute, TargetRoute
from ffs._native.server import NativeServer, ShardInfo, clock_ms

CLUSTER = bytes(range(16))
SPACE, CHAIN, TARGET = 7, 1, 101
SEQUENCES = itertools.count(1)  # of a channel they only go up
NO_REGION, BAD_FRAME = 15, 19
MEMORY = 512 << 10
WRITE_AT, READ_AT = 4097, 300 << 10
DATA = bytes(at * 7 % 251 for at in range(GRANULE + 4433))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NativeServer, ShardInfo]]:
    """One shard with one target in a chain of its own, without a manager."""
    root: Path = tmp_path_factory.mktemp("server")
    device_format(root / "device", cluster=CLUSTER, targets=[TARGET], size_bytes=256 << 20, sparse=True)
    with NativeServer(1, 1, CLUSTER, pool_bytes=48 << 20) as made:
        shard = made.add_device(root / "device")
        made.start()
        made.lease(clock_ms() + 3600_000)
        place = TargetRoute(TARGET, 1, "127.0.0.1", shard.port)
        for epoch, proposed in ((1, True), (2, False)):
            chain = ChainRoute(CHAIN, 1, 1, (TARGET,), (SERVING,), proposed=proposed, incarnations=(1,))
            made.configure(epoch, 1000, [chain], [place])
            until(lambda: made.report()[0].persisted_counter == 1, "the chain is persisted")
        until(lambda: made.report()[0].recorded_counter == 1, "the chain is recorded")
        yield made, shard
        made.stop()


@pytest.fixture
def peer(server: tuple[NativeServer, ShardInfo]) -> Iterator[VerbsPeer]:
    yield from connected(server, 0xBEE)


def connected(server: tuple[NativeServer, ShardInfo], client: int) -> Iterator[VerbsPeer]:
    made = VerbsPeer(server[1].port, CLUSTER, client, memory_bytes=MEMORY)
    try:
        made.open(SPACE)
        yield made
    finally:
        made.close()


def key(index: int) -> str:
    return struct.pack(">QQQ", SPACE, 0, index).hex()


def context(peer: VerbsPeer, *, update: bool = False) -> dict[str, Value]:
    values: dict[str, Value] = {
        "target": TARGET,
        "chain": CHAIN,
        "capability": 1,
        "chain_term": 1,
        "chain_counter": 1,
        "client": peer.client,
        "sequence": next(SEQUENCES) if update else 0,
        "channel": 1 if update else 0,
        "space_epoch": 1,
        "checksum_kind": 1,
    }
    return {f"context.{name}": value for name, value in values.items()}


def write(peer: VerbsPeer, index: int) -> Answer:
    peer.memory.write(DATA, len(DATA), WRITE_AT)
    place = {"address": peer.memory.buf + WRITE_AT, "remote_key": peer.memory.rkey}
    return peer.wait(peer.send_write(context(peer, update=True), key(index), DATA, **place))


def read(peer: VerbsPeer, index: int) -> Answer:
    place = {"address": peer.memory.buf + READ_AT, "remote_key": peer.memory.rkey}
    return peer.wait(peer.send_read(context(peer), key(index), len(DATA), **place))


def test_what_it_writes_it_reads_back(server: tuple[NativeServer, ShardInfo], peer: VerbsPeer) -> None:
    before = server[0].metrics(0)
    name, said, _ = write(peer, 1)
    assert (name, said["status"], said["value"]) == ("update_reply", 0, len(DATA))
    peer.memory.write(b"\xee" * (len(DATA) + 2), len(DATA) + 2, READ_AT - 1)
    name, said, variable = read(peer, 1)
    assert (name, said["status"], said["bytes"]) == ("read_reply", 0, len(DATA))
    assert said["patch_count"] == 0
    assert peer.memory.read(len(DATA) + 2, READ_AT - 1) == b"\xee" + DATA + b"\xee"
    sums = [crc32c(DATA[at : at + GRANULE]) for at in range(0, len(DATA), GRANULE)]
    assert list(struct.unpack(f"<{said['granule_count']}I", variable)) == sums
    after = server[0].metrics(0)
    assert (after.rdma_reads - before.rdma_reads, after.rdma_writes - before.rdma_writes) == (1, 1)
    assert after.rdma_bytes - before.rdma_bytes == 2 * len(DATA)


def test_messages_go_on_for_ever_by_the_credits_that_both_give_back(peer: VerbsPeer) -> None:
    for value in range(1, 81):  # more than both sides have buffers
        peer.ping(value)
    assert peer.told > 40
    # A frame of several messages each way.
    keys = b"".join(bytes.fromhex(key(index)) + bytes(24) for index in range(1000, 1150))
    name, said, variable = peer.wait(peer.send("exists", context(peer) | {"count": 150}, keys))
    assert (name, said["status"], said["count"]) == ("exists_reply", 0, 150)
    assert variable == bytes(8 * 150)


def test_a_server_whose_client_has_no_buffer_left_waits(peer: VerbsPeer) -> None:
    assert write(peer, 5)[1]["status"] == 0
    values = context(peer) | {"key": key(5), "length": len(DATA), "flags": WANT_CHECKSUMS}
    values |= {"bulk.kind": BULK_INLINE, "bulk.length": len(DATA)}
    before = counters()
    peer.holds = True
    asked = peer.send("read", values)  # more messages than there are buffers
    peer.take_until_none_is_left()
    received = peer.received
    time.sleep(0.1)  # one that doesn't wait sends now
    peer.look()
    assert peer.received == received
    peer.holds = False
    name, said, variable = peer.wait(asked)
    assert (name, said["status"], said["bytes"]) == ("read_reply", 0, len(DATA))
    assert variable[4 * said["granule_count"] :] == DATA
    after = counters()
    assert (after["send_rnr_err"], after["rcvd_rnr_err"]) == (before["send_rnr_err"], before["rcvd_rnr_err"])


@pytest.mark.parametrize("fault", ["key", "length"])
@pytest.mark.parametrize("update", [False, True], ids=["read", "update"])
def test_a_wrong_key_or_length_is_said_and_hurts_nobody_else(
    server: tuple[NativeServer, ShardInfo], peer: VerbsPeer, fault: str, update: bool
) -> None:
    assert write(peer, 2)[1]["status"] == 0
    breaks = server[0].metrics(0).rdma_breaks
    for bad in connected(server, 0xBAD):
        remote_key = bad.memory.rkey ^ (0x770000 if fault == "key" else 0)
        address = bad.memory.buf + (MEMORY - 4096 if fault == "length" else 0)
        place = {"address": address, "remote_key": remote_key}
        if update:
            asked = bad.send_write(context(bad, update=True), key(3), DATA, **place)
        else:
            asked = bad.send_read(context(bad), key(2), len(DATA), **place)
        name, said, _ = bad.wait_beside(asked)
        assert name == ("update_reply" if update else "read_reply")
        assert (said["status"], said["detail"]) == (ENXIO, NO_REGION)
    assert server[0].metrics(0).rdma_breaks == breaks + 1
    peer.ping(5)
    assert read(peer, 2)[1]["bytes"] == len(DATA)
    assert peer.memory.read(len(DATA), READ_AT) == DATA


def test_a_reference_that_contradicts_its_request_is_refused(peer: VerbsPeer) -> None:
    """Nothing is moved, and the connection goes on."""
    values = context(peer, update=True) | {"key": key(4), "kind": 1, "length": len(DATA), "bulk.kind": 3}
    values |= {"bulk.length": len(DATA) - 1, "bulk.region": peer.memory.rkey, "bulk.address": peer.memory.buf}
    sums = struct.pack("<2I", 1, 2)
    name, said, _ = peer.wait(peer.send("update", values, sums))
    assert (name, said["status"], said["detail"]) == ("update_reply", EINVAL, BAD_FRAME)
    peer.ping(6)
