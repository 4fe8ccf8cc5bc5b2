"""Holes: punching, preallocating, seeking to data and holes, beside a model and beside other writers."""

from __future__ import annotations

import errno
import os
import random
import threading
from typing import Any

import pytest

import ffs
from ffs import errors
from ffs.client import sparse
from ffs.client.client import Client
from ffs.layout import MAX_FILE_BYTES

CHUNK = 4096


def data_map(file: Any) -> list[tuple[int, int]]:
    """The parts that hold data, by SEEK_DATA and SEEK_HOLE, as `cp --sparse` walks a file."""
    parts: list[tuple[int, int]] = []
    at = 0
    while True:
        try:
            begin = file.seek(at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return parts
        at = file.seek(begin, os.SEEK_HOLE)
        assert at > begin
        parts.append((begin, at))


@pytest.mark.parametrize("stripe", [1, 0])
def test_data_and_holes(client: Client, home: str, stripe: int) -> None:
    with client.open(f"{home}/f", "w+b", 0, chunk_size=CHUNK, stripe=stripe) as file:
        with pytest.raises(OSError, match="isn't inside") as caught:
            file.seek(0, os.SEEK_DATA)
        assert caught.value.errno == errno.ENXIO
        file.pwrite(b"a" * 100, 0)
        file.pwrite(b"b" * 3 * CHUNK, 10 * CHUNK)
        file.pwrite(b"c" * 10, 40 * CHUNK + 50)
        file.truncate(60 * CHUNK)
        expected = [(0, 100), (10 * CHUNK, 13 * CHUNK), (40 * CHUNK, 40 * CHUNK + 60)]
        assert data_map(file) == expected
        assert file.seek(11 * CHUNK + 5, os.SEEK_DATA) == 11 * CHUNK + 5
        assert file.seek(11 * CHUNK + 5, os.SEEK_HOLE) == 13 * CHUNK
        assert file.seek(70, os.SEEK_HOLE) == 100
        assert file.seek(100, os.SEEK_HOLE) == 100
        assert file.tell() == 100
        assert file.seek(101, os.SEEK_DATA) == 10 * CHUNK
        for offset in (-1, 60 * CHUNK, 61 * CHUNK):
            for whence in (os.SEEK_DATA, os.SEEK_HOLE):
                with pytest.raises(OSError, match="isn't inside") as caught:
                    file.seek(offset, whence)
                assert caught.value.errno == errno.ENXIO
        assert file.tell() == 10 * CHUNK  # a seek that failed moves nothing
    with client.open(f"{home}/f", "rb") as reader:  # io's buffer over it does the same
        reader.read(7)
        assert reader.seek(100, os.SEEK_DATA) == 10 * CHUNK
        assert reader.read(3) == b"bbb"
        assert data_map(reader) == expected
    with client.open(f"{home}/f", "r+b") as both:
        both.seek(20 * CHUNK)
        both.write(b"still in the buffer")
        assert both.seek(13 * CHUNK, os.SEEK_DATA) == 20 * CHUNK


def test_a_very_large_hole_is_crossed_at_once(client: Client, home: str) -> None:
    with client.open(f"{home}/f", "w+b", 0, chunk_size=CHUNK) as file:
        file.pwrite(b"end", 1 << 60)
        assert file.seek(0, os.SEEK_DATA) == 1 << 60
        assert file.seek(0, os.SEEK_HOLE) == 0
        assert file.seek(1 << 60, os.SEEK_HOLE) == (1 << 60) + 3
        file.punch_hole(0, MAX_FILE_BYTES)
        assert file.size == (1 << 60) + 3
        assert data_map(file) == []


def test_punching_beside_a_model(client: Client, home: str) -> None:
    """Random writes and holes; what is read, and no data is shown as a hole."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    size = 24 * CHUNK + 123
    with client.open(f"{home}/f", "w+b", 0, chunk_size=CHUNK) as file:
        model = bytearray(draw.randbytes(size))
        file.write(model)
        for _ in range(60):
            offset = draw.choice([draw.randrange(size), draw.randrange(25) * CHUNK])
            length = draw.choice([1, 100, CHUNK, 3 * CHUNK, draw.randrange(1, size)])
            if draw.random() < 0.6:
                file.punch_hole(offset, length)
                hole = max(0, min(size, offset + length) - offset)
                model[offset : offset + hole] = bytes(hole)
            else:
                part = draw.randbytes(min(length, size - offset))
                file.pwrite(part, offset)
                model[offset : offset + len(part)] = part
            assert file.pread(2 * size, 0) == model
        shown = bytearray(size)
        for begin, end in data_map(file):
            shown[begin:end] = model[begin:end]
        assert shown == model
        file.punch_hole(0, 25 * CHUNK)
        assert data_map(file) == []
        assert file.stat().st_size == size
    with client.open(f"{home}/f", "rb") as reader:
        assert reader.read() == bytes(size)


def test_allocated_space_is_there_and_nothing_is_lost(client: Client, home: str) -> None:
    with client.open(f"{home}/f", "w+b", 0, chunk_size=CHUNK) as file:
        file.pwrite(b"a" * 100, 5)
        file.pwrite(b"b" * 10, 3 * CHUNK)
        file.allocate(50, 6 * CHUNK)
        expected = bytearray(6 * CHUNK + 50)
        expected[5:105] = b"a" * 100
        expected[3 * CHUNK : 3 * CHUNK + 10] = b"b" * 10
        assert client.getsize(f"{home}/f") == len(expected)
        assert file.pread(10 * CHUNK, 0) == expected
        assert data_map(file) == [(0, len(expected))]
        file.allocate(0, 10)  # inside: nothing changes
        assert client.getsize(f"{home}/f") == len(expected)
        with pytest.raises(errors.FfsError, match="keep_size") as caught:
            file.allocate(0, 10, keep_size=True)
        assert caught.value.errno == errno.EOPNOTSUPP
        for call in (file.allocate, file.punch_hole):
            for offset, length in ((-1, 10), (0, 0), (0, -5)):
                with pytest.raises(errors.InvalidArgument):
                    call(offset, length)
            with pytest.raises(errors.TooLarge) as large:
                call(MAX_FILE_BYTES - 5, 6)
            assert large.value.errno == errno.EFBIG
        assert file.pread(10 * CHUNK, 0) == expected
    with client.open(f"{home}/f", "rb", 0) as reader:
        for call in (reader.allocate, reader.punch_hole):
            with pytest.raises(errors.Unsupported):
                call(0, 1)
    with client.open(f"{home}/log", "ab", 0, chunk_size=CHUNK) as log:
        log.allocate(0, 2 * CHUNK)
        assert client.getsize(f"{home}/log") == 2 * CHUNK


def test_allocating_never_overwrites_what_others_write(
    address: str, client: Client, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer makes a chunk, and lets one grow, between the look at what is there and the zeros."""
    path = f"{home}/f"
    look = sparse.lengths
    looks: list[list[int]] = []
    with (
        ffs.connect(address) as other,
        client.open(path, "w+b", 0, chunk_size=CHUNK) as file,
        other.open(path, "r+b", 0) as writer,
    ):
        writer.pwrite(b"a" * 100, 0)

        def look_and_write(*arguments: Any) -> list[int]:
            found = look(*arguments)
            looks.append(found)
            if len(looks) == 2:  # the first one judges the room
                writer.pwrite(b"b" * 50, 100)
                writer.pwrite(b"c" * 70, CHUNK)
            return found

        monkeypatch.setattr(sparse, "lengths", look_and_write)
        file.allocate(0, 3 * CHUNK)
        assert looks == [[100, -1, -1], [100, -1, -1], [150, 70, CHUNK]]
        expected = b"a" * 100 + b"b" * 50 + bytes(CHUNK - 150) + b"c" * 70 + bytes(2 * CHUNK - 70)
        assert file.pread(4 * CHUNK, 0) == expected
    with client.open(path, "rb") as reader:
        assert reader.read() == expected


def test_writing_beside_allocation_and_punching(address: str, client: Client, home: str) -> None:
    """One writer fills chunks by pieces while another allocates the file and punches a chunk between them."""
    path = f"{home}/f"
    stop = threading.Event()
    failures: list[BaseException] = []
    with (
        ffs.connect(address) as other,
        client.open(path, "w+b", 0, chunk_size=CHUNK) as writer,
        other.open(path, "r+b", 0) as allocator,
    ):

        def allocate() -> None:
            try:
                while not stop.is_set():
                    allocator.allocate(0, 3 * CHUNK)
                    allocator.punch_hole(CHUNK, CHUNK)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=allocate)
        thread.start()
        piece = CHUNK // 16
        for turn in range(1, 4):
            for at in [*range(0, CHUNK, piece), *range(2 * CHUNK, 3 * CHUNK, piece)]:
                writer.pwrite(bytes([turn]) * piece, at)
                assert writer.pread(piece, at) == bytes([turn]) * piece
        stop.set()
        thread.join(60)
        assert failures == []
        assert writer.pread(CHUNK, 0) == b"\3" * CHUNK
        assert writer.pread(CHUNK, 2 * CHUNK) == b"\3" * CHUNK


def test_a_hole_or_an_allocation_under_an_old_epoch_goes_under_the_new_one(
    address: str, client: Client, home: str
) -> None:
    path = f"{home}/f"
    with ffs.connect(address) as other, client.open(path, "w+b", 0, chunk_size=CHUNK) as file:
        file.pwrite(b"x" * 8 * CHUNK, 0)
        file.flush()
        other.truncate(path, 6 * CHUNK)
        file.punch_hole(CHUNK, CHUNK)
        assert other.getsize(path) == 6 * CHUNK
        other.truncate(path, 3 * CHUNK)
        file.allocate(0, 5 * CHUNK)
        expected = b"x" * CHUNK + bytes(CHUNK) + b"x" * CHUNK + bytes(2 * CHUNK)
        assert other.getsize(path) == 5 * CHUNK
        assert file.pread(9 * CHUNK, 0) == expected
        assert data_map(file) == [(0, 5 * CHUNK)]


def test_allocating_more_than_is_free_makes_nothing(client: Client, home: str) -> None:
    with client.open(f"{home}/f", "wb", 0, chunk_size=CHUNK) as file:
        file.write(b"x" * 100)
        usage = client.disk_usage(home)
        for wanted in (usage.free + (64 << 20), 1 << 50):
            with pytest.raises(errors.NoSpace, match=r"to be allocated, \d+ are free"):
                file.allocate(0, wanted)
        file.pwrite(b"y", 50)
        assert file.size == 100
        # Without a look at the length, which would hide chunks beyond it.
        session = client.core.session()
        extent = file._open_file.extent(session)
        held = sparse.lengths(session.rings, session, extent, 0, 1000)
        assert held == [100] + [-1] * 999


def test_du_counts_holes_only_when_it_counts_lengths(run: Any, client: Client, home: str) -> None:
    with client.open(f"{home}/sparse", "wb", buffering=0) as file:
        chunk = file.placement.layout.chunk_size
        file.write(b"x" * 1000)
        file.pwrite(b"y" * 10, 5 * chunk)
        file.truncate(9 * chunk + 7)
        assert file.held_bytes() == 1010
    with client.open(f"{home}/full", "wb") as file:
        file.write(b"z" * (chunk + 3))
    client.symlink("sparse", f"{home}/link")
    total = 9 * chunk + 7 + chunk + 3 + 6
    assert run("du", "-s", "-b", home)[1] == f"{total}\t{home}\n"
    assert run("du", "-s", "-b", "--allocated", home)[1] == f"{1010 + chunk + 3 + 6}\t{home}\n"
    assert run("du", "-b", "--allocated", f"{home}/sparse")[1] == f"1010\t{home}/sparse\n"
