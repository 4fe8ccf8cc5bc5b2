"""The ring against real servers: what is written is what is read, over both transports."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ffs import errors
from ffs._native.iov import Iov
from ffs._native.ring import (
    EXISTS_ENTRY_DTYPE,
    EXISTS_KEY_DTYPE,
    OP_CREATE,
    OP_EXISTS,
    OP_LAST_CHUNK,
    OP_READ,
    OP_REMOVE,
    OP_REPLACE,
    OP_TRUNCATE,
    OP_WRITE,
    SQE_COMPARE_TAG,
    SQE_DTYPE,
    SQE_ZERO_FILL,
    Ring,
    error_of_cqe,
)

from .conftest import Nodes, capability, finish, key, until

CHUNK = 1 << 20


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path_factory.mktemp("three"), 3, 3)
    yield nodes
    nodes.end()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path_factory.mktemp("one"), 1, 1)
    yield nodes
    nodes.end()


def one_request(ring: Ring, *args: Any, **options: Any) -> Any:
    ring.prepare_one(*args, **options)
    (cqe,) = finish(ring, 1)
    return cqe


@pytest.mark.parametrize("transport", ["tcp", "local"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_random_reads_and_writes_equal_a_model(tmp_path: Path, transport: str, replicas: int) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    nodes = Nodes(tmp_path, replicas, 2)
    chunks = 6
    model = np.zeros((chunks, CHUNK), dtype=np.uint8)
    length = [0] * chunks
    try:
        client = nodes.client(transport)
        right = client.add_capability(capability(client))
        with Ring(client, 64) as ring, Iov(4 << 20) as iov:
            memory = iov.numpy()
            for turn in range(120):
                chunk = int(rng.integers(chunks))
                aligned = bool(rng.integers(2))
                offset = int(rng.integers(CHUNK))
                size = int(rng.integers(1, CHUNK - offset + 1))
                place = int(rng.integers(3 << 20))
                if aligned:
                    offset, place = offset & ~4095, place & ~4095
                    size = min(size | 4095, CHUNK - offset - 1) + 1 & ~4095 or 4096
                chain = chunk % 2 + 1
                if turn % 2 == 0:
                    memory[place : place + size] = data = rng.integers(0, 256, size, dtype=np.uint8)
                    cqe = one_request(
                        ring, OP_WRITE, chain, right, key(chunk), offset, size, iov[place : place + size], 1
                    )
                    assert cqe["result"] == size, error_of_cqe(cqe)
                    model[chunk, offset : offset + size] = data
                    length[chunk] = max(length[chunk], offset + size)
                else:
                    around = memory.copy()
                    cqe = one_request(
                        ring,
                        OP_READ,
                        chain,
                        right,
                        key(chunk),
                        offset,
                        size,
                        iov[place : place + size],
                        1,
                        flags=SQE_ZERO_FILL,
                    )
                    assert cqe["result"] == size, error_of_cqe(cqe)
                    around[place : place + size] = model[chunk, offset : offset + size]
                    assert np.array_equal(memory, around)
            stats = ring.stats()
            assert stats.failed == 0
            del memory, around
        client.close()
    finally:
        nodes.end()


def test_local_copies_nothing_on_reads_and_writes_once(one: Nodes) -> None:
    """By the counters of both ends: what the processor has moved of payloads."""
    client = one.client("local")
    right = client.add_capability(capability(client))
    with Ring(client, 256) as ring, Iov(8 << 20) as iov:
        iov.numpy()[: 4 << 20] = np.random.default_rng(3).integers(0, 256, 4 << 20, dtype=np.uint8)

        def write_all() -> None:
            for i in range(4):
                ring.prepare_one(OP_WRITE, 1, right, key(i), 0, CHUNK, iov[i << 20 : (i + 1) << 20], i)
            assert (finish(ring, 4)["result"] == CHUNK).all()

        def copied() -> tuple[int, int]:
            return ring.stats().bytes_copied, one.nodes[0].tell("metrics")["bytes_copied"]

        # Until the server has taken the region, which a thread beside does, writes come through the socket.
        at_server = copied()[1]
        while copied()[1] == at_server:
            write_all()

        at_ring, at_server = copied()
        write_all()
        assert copied() == (at_ring, at_server + 4 * CHUNK)

        def read_all() -> None:
            iov.numpy()[4 << 20 :] = 0
            for i in range(4):
                ring.prepare_one(OP_READ, 1, right, key(i), 0, CHUNK, iov[(4 + i) << 20 : (5 + i) << 20], i)
            assert (finish(ring, 4)["result"] == CHUNK).all()
            assert np.array_equal(iov.numpy()[: 4 << 20], iov.numpy()[4 << 20 :])

        read_all()
        for i in range(256):  # small ones go many in a frame
            place = (4 << 20) + i * 4096
            ring.prepare_one(OP_READ, 1, right, key(1), i * 4096, 4096, iov[place : place + 4096], i)
        sends = ring.stats().send_calls
        assert (finish(ring, 256)["result"] == 4096).all()
        assert ring.stats().send_calls == sends + 1
        assert np.array_equal(iov.numpy()[1 << 20 : 2 << 20], iov.numpy()[4 << 20 : 5 << 20])
        assert copied() == (at_ring, at_server + 4 * CHUNK)
    client.close()


@pytest.mark.parametrize("transport", ["tcp", "local"])
def test_reads_into_memory_of_somebody_else(one: Nodes, transport: str) -> None:
    """Whole chunks, and ranges that begin inside of sectors and granules, to odd addresses."""
    client = one.client(transport)
    right = client.add_capability(capability(client))
    content = np.random.default_rng(5).integers(0, 256, CHUNK, dtype=np.uint8)
    theirs = np.zeros(CHUNK + 64, dtype=np.uint8)
    with Ring(client, 16) as ring, Iov(CHUNK) as iov, Iov.over(theirs) as over:
        iov.numpy()[:] = content
        one_request(ring, OP_WRITE, 1, right, key(900), 0, CHUNK, iov[0:CHUNK], 1)
        if transport == "local":  # reads go through the socket until the server knows of the memory

            def landed_once() -> bool:
                one_request(ring, OP_READ, 1, right, key(900), 0, 16384, over[0:16384], 1)
                return bool(ring.stats().bytes_landed)

            until(landed_once)
        before = ring.stats().bytes_landed
        for place, offset, size in (
            (3, 0, CHUNK),
            (0, 4096, 3 * 65536),
            (1, 777, 65536),
            (9, 70_001, 1000),
        ):
            theirs[:] = 0
            cqe = one_request(ring, OP_READ, 1, right, key(900), offset, size, over[place : place + size], 1)
            assert cqe["result"] == size
            assert np.array_equal(theirs[place : place + size], content[offset : offset + size])
            assert not theirs[:place].any()
            assert not theirs[place + size :].any()
        landed = CHUNK + 4 * 65536 if transport == "local" else 0  # the small one doesn't
        assert ring.stats().bytes_landed == before + landed
    client.close()


@pytest.mark.parametrize("transport", ["tcp", "local"])
def test_thousands_of_requests_in_one_call(three: Nodes, transport: str) -> None:
    client = three.client(transport)
    right = client.add_capability(capability(client))
    n = 4096
    with Ring(client, 4096) as ring, Iov(2 * n * 4096) as iov:
        rng = np.random.default_rng(11)
        memory = iov.numpy().reshape(2, n * 4096)
        memory[0] = rng.integers(0, 256, n * 4096, dtype=np.uint8)
        index = np.arange(n)
        sqes = np.zeros(n, dtype=SQE_DTYPE)
        sqes["op"] = OP_WRITE
        sqes["chain"] = (index // 256) % 3 + 1
        sqes["capability"] = right
        sqes["group"] = 1
        sqes["key"] = np.frombuffer(b"".join(key(int(i) // 256) for i in index), dtype=np.uint8).reshape(
            n, 24
        )
        sqes["offset"] = index % 256 * 4096
        sqes["length"] = 4096
        sqes["iov"] = iov.handle
        sqes["iov_offset"] = index * 4096
        sqes["userdata"] = index
        order = rng.permutation(n)
        assert ring.prepare(sqes[order]) == n
        done = finish(ring, n)
        assert sorted(done["userdata"].tolist()) == index.tolist()
        assert (done["result"] == 4096).all()
        sqes["op"] = OP_READ
        sqes["iov_offset"] += n * 4096
        assert ring.prepare(sqes[order]) == n
        assert ring.prepare(sqes[:1]) == 0  # full
        assert (finish(ring, n)["result"] == 4096).all()
        assert np.array_equal(memory[0], memory[1])
        del memory
    client.close()


def test_one_group_of_two_gib_and_a_byte(one: Nodes) -> None:
    """Written over one transport, read over the other."""
    total = (1 << 31) + 1
    large = 16 << 20
    with Iov(total) as iov:
        n = -(-total // large)
        sqes = np.zeros(n, dtype=SQE_DTYPE)
        sqes["chain"] = 1
        sqes["group"][0] = n
        sqes["key"] = np.frombuffer(b"".join(map(key, range(n))), dtype=np.uint8).reshape(n, 24)
        sqes["length"] = large
        sqes["length"][-1] = 1
        sqes["iov"] = iov.handle
        sqes["iov_offset"] = np.arange(n) * large
        sqes["userdata"] = 5
        sqes["timeout_ms"] = 300_000
        words = iov.numpy("<u8")
        words[:] = np.arange(len(words), dtype=np.uint64)
        iov.numpy()[total - 1] = 0x5A
        for op, transport in ((OP_WRITE, "tcp"), (OP_READ, "local")):
            client = one.client(transport)
            sqes["op"] = op
            sqes["capability"] = client.add_capability(capability(client))
            with Ring(client, 256) as ring:
                assert ring.prepare(sqes) == n
                (done,) = finish(ring, 1, 300)
                assert done["result"] == total
            client.close()
            if op == OP_WRITE:
                words[:] = 0
        assert iov.numpy()[total - 1] == 0x5A
        step = 1 << 24
        for at in range(0, total // 8, step):
            end = min(at + step, total // 8)
            assert np.array_equal(words[at:end], np.arange(at, end, dtype=np.uint64))


def test_chunk_operations_have_their_results(three: Nodes) -> None:
    client = three.client()
    right = client.add_capability(capability(client))
    with Ring(client, 16) as ring, Iov(1 << 20) as iov:
        memory = iov.buffer()
        memory[0:8] = b"abcdefgh"

        def do(op: int, index: int, offset: int = 0, length: int = 0, **options: Any) -> Any:
            data = iov[0:length] if length and op not in (OP_TRUNCATE,) else None
            return one_request(ring, op, 1, right, key(index, 77), offset, length, data, 7, **options)

        assert do(OP_READ, 1, 0, 8)["result"] == -2  # absent
        assert do(OP_CREATE, 1, 0, 8, tag=b"0123456789abcdef")["result"] == 8
        again = do(OP_CREATE, 1, 0, 8, tag=b"0123456789abcdef")
        assert (again["result"], again["value"]) == (-17, 8)
        assert isinstance(error_of_cqe(again), errors.Exists)
        other = do(OP_CREATE, 1, 0, 8, tag=b"0123456789abcdeX")
        assert isinstance(error_of_cqe(other), errors.TagMismatch)
        wrong = do(OP_READ, 1, 0, 8, tag=b"0123456789abcdeX", flags=SQE_COMPARE_TAG)
        assert isinstance(error_of_cqe(wrong), errors.TagMismatch)
        right_tag = do(OP_READ, 1, 0, 8, tag=b"0123456789abcdef", flags=SQE_COMPARE_TAG)
        assert (right_tag["result"], bytes(right_tag["tag"])) == (8, b"0123456789abcdef")

        memory[0:8] = b"replaced"
        assert do(OP_REPLACE, 2, 0, 8)["result"] == 8
        assert do(OP_TRUNCATE, 2, 0, 3)["result"] == 0
        memory[0:8] = bytes(8)
        short = do(OP_READ, 2, 0, 8)
        assert (short["result"], bytes(memory[0:3]), short["chunk_length"]) == (3, b"rep", 3)

        last = do(OP_LAST_CHUNK, 0)
        assert (last["result"], last["value"], bytes(last["key"])) == (3, 2, key(2, 77))

        keys = np.zeros(3, dtype=EXISTS_KEY_DTYPE)
        for i in range(3):
            keys["key"][i] = np.frombuffer(key(i, 77), dtype=np.uint8)
        memory[0 : keys.nbytes] = keys.tobytes()
        ring.prepare_one(OP_EXISTS, 1, right, key(0, 77), 0, 3, iov[0 : keys.nbytes], 9)
        (found,) = finish(ring, 1)
        assert found["result"] == 3
        entries = np.frombuffer(memory[: 3 * EXISTS_ENTRY_DTYPE.itemsize], dtype=EXISTS_ENTRY_DTYPE)
        assert entries["state"].tolist() == [0, 1, 1]
        assert entries["length"].tolist() == [0, 8, 3]

        assert do(OP_REMOVE, 2)["result"] == 0
        assert do(OP_READ, 2, 0, 8)["result"] == -2
        del entries
        memory.release()
    client.close()


def test_a_capability_is_needed_that_covers_the_request(one: Nodes) -> None:
    client = one.client()
    reading = client.add_capability(capability(client, rights=1, kind=0))
    elsewhere = client.add_capability(capability(client, space=10, kind=0))
    with Ring(client, 16) as ring, Iov(4096) as iov:
        for right in (reading, elsewhere):
            cqe = one_request(ring, OP_WRITE, 1, right, key(1), 0, 100, iov[0:100], 1)
            assert isinstance(error_of_cqe(cqe), PermissionError)
        assert one_request(ring, OP_READ, 1, reading, key(999), 0, 100, iov[0:100], 1)["result"] == -2
        client.drop_capability(reading)
        with pytest.raises(errors.InvalidArgument, match="capability"):
            ring.prepare_one(OP_READ, 1, reading, key(1), 0, 100, iov[0:100], 1)
    client.close()


def test_another_clusters_client_is_refused(one: Nodes) -> None:
    from ffs._native.ring import NativeClient

    client = NativeClient(5, bytes(16))
    client.set_routing(2, one.chains(), one.places)
    right = client.add_capability(capability(client))
    with Ring(client, 16) as ring, Iov(4096) as iov:
        cqe = one_request(ring, OP_READ, 1, right, key(1), 0, 100, iov[0:100], 1)
        assert isinstance(error_of_cqe(cqe), errors.WrongCluster)
    client.close()


def test_without_checksums_and_with_them_the_data_is_the_same(one: Nodes) -> None:
    with Iov(4 << 20) as iov:
        memory = iov.numpy()
        memory[:CHUNK] = np.random.default_rng(1).integers(0, 256, CHUNK, dtype=np.uint8)
        for number, (writes, reads) in enumerate([(True, False), (False, True)]):
            for transport in ("tcp", "local"):
                writer, reader = one.client(transport, checksum=writes), one.client(transport, checksum=reads)
                with Ring(writer, 4) as out, Ring(reader, 4) as back:
                    right = writer.add_capability(capability(writer))
                    cqe = one_request(out, OP_WRITE, 1, right, key(number), 0, CHUNK, iov[0:CHUNK], 1)
                    assert cqe["result"] == CHUNK
                    right = reader.add_capability(capability(reader))
                    memory[CHUNK : 2 * CHUNK] = 0
                    part = iov[CHUNK : 2 * CHUNK]
                    cqe = one_request(back, OP_READ, 1, right, key(number), 0, CHUNK, part, 1)
                    assert cqe["result"] == CHUNK
                    assert np.array_equal(memory[:CHUNK], memory[CHUNK : 2 * CHUNK])
                writer.close()
                reader.close()
        del memory


def test_threads_with_rings_of_their_own(three: Nodes) -> None:
    client = three.client()
    right = client.add_capability(capability(client))
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with Ring(client, 32) as ring, Iov(1 << 20) as iov:
                memory = iov.numpy()
                for turn in range(10):
                    memory[: 1 << 19] = np.random.default_rng((number, turn)).integers(
                        0, 256, 1 << 19, dtype=np.uint8
                    )
                    for i in range(8):
                        part = iov[i << 16 : (i + 1) << 16]
                        chain = i % 3 + 1
                        ring.prepare_one(OP_WRITE, chain, right, key(100 * number + i), 0, 1 << 16, part, i)
                    assert (finish(ring, 8)["result"] == 1 << 16).all()
                    for i in range(8):
                        part = iov[(1 << 19) + (i << 16) : (1 << 19) + ((i + 1) << 16)]
                        chain = i % 3 + 1
                        ring.prepare_one(OP_READ, chain, right, key(100 * number + i), 0, 1 << 16, part, i)
                    assert (finish(ring, 8)["result"] == 1 << 16).all()
                    assert np.array_equal(memory[: 1 << 19], memory[1 << 19 :])
                del memory
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    client.close()


def test_connections_and_regions_go_with_their_ring(one: Nodes) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    client = one.client("local")
    right = client.add_capability(capability(client))
    before = 0
    for turn in range(200):
        with Ring(client, 4) as ring, Iov(8192) as iov:
            for _ in range(2):
                assert one_request(ring, OP_READ, 1, right, key(997), 0, 4096, iov[0:4096], 1)["result"] == -2
        if turn == 10:
            gc.collect()
            before = descriptors()
    gc.collect()
    assert descriptors() <= before
    client.close()

    def quiet() -> bool:
        metrics = one.nodes[0].tell("metrics")
        return bool(metrics["sessions"] == 0 and metrics["regions"] == 0 and metrics["region_bytes"] == 0)

    from .conftest import until

    until(quiet)
