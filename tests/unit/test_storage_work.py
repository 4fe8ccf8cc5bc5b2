"""storage_server.chunk_work and metrics: steps against completions, and the text for Prometheus."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

pytest.importorskip("ffs._native._ffs", reason="the native library isn't built")

import numpy as np

from ffs._native.ring import (
    CQE_DTYPE,
    LIST_ALL_SPACES,
    OP_LIST_CHUNKS,
    OP_REMOVE_RANGE,
    OP_SPACE_EPOCH,
    OP_TRUNCATE,
)
from ffs._native.routes import TargetRoute, c_targets
from ffs._native.server import ShardMetrics, SpaceUse, TargetReport
from ffs.errors import DeadlineExceeded, FfsError, StaleEpoch
from ffs.proto.chain_calls import (
    LastChunk,
    LastChunkReply,
    ListChunks,
    ListChunksReply,
    RaiseSpaceEpoch,
    RemovePage,
    RemovePageReply,
    RemoveSpaces,
    RemoveSpacesReply,
    TruncateChunk,
)
from ffs.proto.cluster import TargetReport as WireReport
from ffs.proto.common import Message, OkReply, error_reply
from ffs.rpc.codec import decode_message, encode_message
from storage_server.chunk_work import LISTING_BYTES, Listing, Operation, Steps, removal_of, steps_of
from storage_server.metrics import COUNTERS, GAUGES, MetricsServer, render

SPACE = 77
ENOENT, ESTALE, EIO = 2, 116, 5


def key(index: int) -> bytes:
    return SPACE.to_bytes(8, "big") + index.to_bytes(16, "big")


def completion(result: int = 0, detail: int = 0, **fields: Any) -> Any:
    row = np.zeros(1, dtype=CQE_DTYPE)[0]
    row["result"], row["detail"] = result, detail
    for name, value in fields.items():
        row[name] = np.frombuffer(value, dtype="u1") if isinstance(value, bytes) else value
    return row


def drive(request: Any, answer: Any) -> tuple[list[Operation], Message]:
    """Runs the steps; `answer(operation)` gives each completion."""
    return drive_steps(steps_of(request), answer)


def drive_steps(steps: Steps, answer: Any) -> tuple[list[Operation], Message]:
    asked = []
    wanted = next(steps)
    while True:
        asked.append(wanted)
        try:
            wanted = steps.send(answer(wanted))
        except StopIteration as done:
            return asked, done.value


def test_raise_epoch_is_a_maximum() -> None:
    request = RaiseSpaceEpoch(chain=1, space=SPACE, epoch=4)
    asked, reply = drive(request, lambda _: completion())
    assert asked == [Operation(OP_SPACE_EPOCH, key(0), 0, 4)]
    assert reply == OkReply()
    assert drive(request, lambda _: completion(-ESTALE, 5))[1] == OkReply()
    with pytest.raises(FfsError):
        drive(request, lambda _: completion(-EIO))


def test_truncate() -> None:
    request = TruncateChunk(chain=1, key=key(3), length_bytes=10, epoch=2)
    asked, reply = drive(request, lambda _: completion())
    assert asked == [Operation(OP_TRUNCATE, key(3), 10, 2)]
    assert reply == OkReply()
    assert drive(request, lambda _: completion(-ENOENT))[1] == OkReply()
    with pytest.raises(StaleEpoch):
        drive(request, lambda _: completion(-ESTALE, 5))


def test_last_chunk() -> None:
    request = LastChunk(chain=1, space=SPACE)
    _, reply = drive(request, lambda _: completion(key=key(9), chunk_length=123, value=4))
    assert reply == LastChunkReply(key=key(9), length_bytes=123, chunks=4)
    assert drive(request, lambda _: completion(-ENOENT))[1] == LastChunkReply(
        key=b"", length_bytes=0, chunks=0
    )


@pytest.mark.parametrize(("limit", "asked_for"), [(0, 1024), (7, 7), (5000, 1024)])
def test_listing_asks_for_all_spaces(limit: int, asked_for: int) -> None:
    memory = memoryview(bytes(range(256)) * (LISTING_BYTES // 256))
    request = ListChunks(chain=1, start=key(3), limit=limit)
    asked, reply = drive(request, lambda _: Listing(completion(2, value=1), memory))
    assert asked == [Operation(OP_LIST_CHUNKS, key(3), asked_for, 0, LIST_ALL_SPACES)]
    assert reply == ListChunksReply(entries=bytes(range(64)), more=True)
    assert drive(request, lambda _: Listing(completion(0), memory))[1] == ListChunksReply(
        entries=b"", more=False
    )
    with pytest.raises(StaleEpoch):
        drive(request, lambda _: Listing(completion(-ESTALE, 5), memory))


@pytest.mark.parametrize("epoch", [6, 2**64 - 1])
def test_removing_asks_for_pages(epoch: int) -> None:
    request = RemovePage(chain=1, space=SPACE, epoch=epoch, start=(5).to_bytes(16, "big"))
    asked, reply = drive(request, lambda _: completion(value=64, chunk_length=1))
    assert asked == [Operation(OP_REMOVE_RANGE, key(5), 0, epoch)]
    assert reply == RemovePageReply(removed=64, more=True)
    assert drive(request, lambda _: completion(value=3))[1] == RemovePageReply(removed=3, more=False)
    assert drive(request, lambda _: completion(-ENOENT))[1] == RemovePageReply(removed=0, more=False)
    with pytest.raises(StaleEpoch):
        drive(request, lambda _: completion(-ESTALE, 5))


def test_removing_a_space_closes_it_first_and_goes_on_to_its_end() -> None:
    pages = iter([completion(), completion(value=64, chunk_length=1), completion(value=3)])
    asked, reply = drive_steps(removal_of(1, SPACE, 9, lambda: True), lambda _: next(pages))
    assert asked == [Operation(OP_SPACE_EPOCH, key(0), 0, 9), *[Operation(OP_REMOVE_RANGE, key(0), 0, 9)] * 2]
    assert reply == OkReply()
    with pytest.raises(FfsError):
        drive_steps(removal_of(1, SPACE, 9, lambda: True), lambda wanted: completion(-EIO))


def test_a_space_with_more_than_there_is_time_for_holds_up_no_others() -> None:
    pages = iter([completion(), completion(value=64, chunk_length=1), completion(value=64, chunk_length=1)])
    left = iter([True, False])
    with pytest.raises(DeadlineExceeded, match="space 77 has more on chain 1"):
        drive_steps(removal_of(1, SPACE, 9, lambda: next(left)), lambda _: next(pages))
    assert next(pages, None) is None


def test_bytes_of_removals() -> None:
    """docs/control_plane.md, Storage control."""
    wanted = {
        "94cc9e0192920107920207cfffffffffffffffff": RemoveSpaces(pairs=((1, 7), (2, 7)), epoch=2**64 - 1),
        "93cc9f0190": RemoveSpacesReply(),
    }
    for text, message in wanted.items():
        assert encode_message(message).hex() == text
        assert decode_message(bytes.fromhex(text)) == message
    failed = RemoveSpacesReply(failed=((1, error_reply(StaleEpoch("old"))),))
    assert decode_message(encode_message(failed)) == failed


def shard(**fields: int) -> ShardMetrics:
    return ShardMetrics(**{name: fields.get(name, 0) for name in ShardMetrics.__slots__})


def report(target: int, state: int) -> TargetReport:
    return TargetReport(
        **{name: 0 for name in TargetReport._fields} | {"target": target, "state": state, "used_bytes": 9}  # type: ignore[arg-type]
    )


def test_metrics_text() -> None:
    text = render(
        [shard(reads=7, longest_step_us=1500), shard(reads=8)],
        [report(3, 1), report(4, 0)],
        {"ffs_node": 2.0},
        [SpaceUse(3, 77, 5, 4096, 6, 7, 8, 9, ready=True, shared_chunks=2, saved_bytes=1024)],
    )
    assert 'ffs_space_evicted_total{target="3",space="77"} 6\n' in text
    assert 'ffs_space_expired_total{target="3",space="77"} 9\n' in text
    assert 'ffs_space_shared_chunks{target="3",space="77"} 2\n' in text
    assert 'ffs_space_saved_bytes{target="3",space="77"} 1024\n' in text
    assert 'ffs_reads_total{shard="0"} 7\nffs_reads_total{shard="1"} 8\n' in text
    assert 'ffs_longest_step_seconds{shard="0"} 0.0015' in text
    assert 'ffs_target_state{target="3",chain="0"} 1' in text
    assert "ffs_node 2\n" in text
    names = set()
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+(\{\w+="\d+"(,\w+="\d+")*\})? [0-9.e+-]+', line), line
        if line.startswith("# TYPE"):
            assert line.split()[2] not in names
            names.add(line.split()[2])
    assert set(COUNTERS) | set(GAUGES) == set(ShardMetrics.__slots__)


def test_metrics_server_answers_and_refuses() -> None:
    async def ask(address: tuple[str, int], request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    async def main() -> None:
        async with MetricsServer(("127.0.0.1", 0), lambda: "ffs_x 1\n") as server:
            found = await ask(server.address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert found.startswith(b"HTTP/1.1 200 OK\r\n")
            assert found.endswith(b"\r\n\r\nffs_x 1\n")
            assert (await ask(server.address, b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404")
            assert (await ask(server.address, b"POST /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404")
            assert await ask(server.address, b"x" * 20_000) == b""
            with pytest.raises(OSError, match="can't serve metrics"):
                async with MetricsServer(server.address, str):
                    pass

    asyncio.run(main())


def test_reports_travel_as_they_come_from_the_native_server() -> None:
    """A heartbeat hands them on field by field, without looking at names."""
    assert TargetReport._fields == WireReport.__struct_fields__


def test_routes_are_made_once_for_a_tuple() -> None:
    places = (TargetRoute(7, 1, "127.0.0.1", 4000), TargetRoute(8, 2, "127.0.0.1", 4001))
    made = c_targets(places)
    assert c_targets(places) is made
    assert [entry.target for entry in c_targets(list(places))] == [7, 8]
    assert c_targets(list(places)) is not made  # a list may have changed since
    assert [entry.target for entry in c_targets(places[:1])] == [7]
