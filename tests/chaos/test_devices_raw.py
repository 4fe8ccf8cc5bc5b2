"""Raw block devices, as they are: loop devices with direct I/O, of 512 and 4096-byte sectors.

Root only: elsewhere each test is skipped, and says why. native/test/engine_raw.cc has the engine by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from errno import EROFS
from pathlib import Path
from typing import Protocol

import pytest

pytest.importorskip("ffs._native._ffs", reason="the native library isn't built")

from chaos_cluster import Cluster, until
from chaos_hosts import Loopback
from chaos_loops import DIRECTORY, Loop

import ffs
from ffs._native.device import device_check, device_discard, device_format, device_inspect, device_survey
from ffs.cli import main
from ffs.errors import Busy, Exists, FfsError, InvalidArgument, NotFound
from storage_server.config import DeviceChoice
from storage_server.devices import prepare, resolve, survey

CLUSTER = bytes(range(16))
SIZE = 256 << 20
SEED = 5


class MakeLoop(Protocol):
    def __call__(self, sector: int = 4096, size: int = SIZE) -> Loop: ...


@pytest.fixture
def make_loop() -> Iterator[MakeLoop]:
    loops: list[Loop] = []
    with tempfile.TemporaryDirectory(dir=DIRECTORY, prefix="ffs-loops-") as directory:

        def make(sector: int = 4096, size: int = SIZE) -> Loop:
            try:
                loops.append(Loop(Path(directory) / f"disk{len(loops)}", size, sector))
            except OSError as error:
                pytest.skip(f"no loop devices here: {error}")
            return loops[-1]

        yield make
        for loop in loops:
            loop.detach()


def write(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as device:
        device.seek(offset)
        device.write(data)
        device.flush()
        os.fsync(device.fileno())


def read(path: str, offset: int, size: int) -> bytes:
    with open(path, "rb") as device:
        device.seek(offset)
        return device.read(size)


async def one_target(_uuid: bytes, _count: int) -> tuple[int, ...]:
    return (1,)


def blkid(path: str) -> str:
    """What util-linux finds there: an oracle that isn't ours. Without it, nothing."""
    if shutil.which("blkid") is None:
        return ""
    return subprocess.run(["blkid", "-p", path], capture_output=True, text=True, check=False).stdout


GPT = b"EFI PART" + bytes(84)
STRANGERS = [
    ("ext2/3/4", ["mkfs.ext4", "-q", "-F"], []),
    ("swap", ["mkswap", "-q"], []),
    ("XFS", ["mkfs.xfs", "-q", "-f"], []),
    ("btrfs", ["mkfs.btrfs", "-q", "-f"], []),
    ("FAT", ["mkfs.vfat", "-I"], []),
    ("LUKS", [], [(0, b"LUKS\xba\xbe\0\1")]),
    ("LVM", [], [(512, b"LABELONE" + bytes(16) + b"LVM2 001")]),
    ("MBR partition table", [], [(446, b"\0\0\2\0\x83\0\0\0\0\x08\0\0\0\0\1\0"), (510, b"\x55\xaa")]),
    ("GPT", [], [(4096, GPT), (SIZE - 4096, GPT)]),
]


@pytest.mark.parametrize(("name", "command", "places"), STRANGERS, ids=[name for name, _, _ in STRANGERS])
def test_what_is_somebody_elses_is_named_and_left_alone_unless_forced(
    make_loop: MakeLoop, name: str, command: list[str], places: list[tuple[int, bytes]]
) -> None:
    loop = make_loop(4096 if name == "GPT" else 512)
    if command and shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} isn't installed")
    if command:
        subprocess.run([*command, loop.path], check=True, capture_output=True)
    for offset, data in places:
        write(loop.path, offset, data)
    before = read(loop.path, 0, 1 << 20)
    choice = DeviceChoice(loop.path, 0)
    with pytest.raises(Exists, match=name):
        device_format(loop.path, cluster=CLUSTER, targets=[1])
    with pytest.raises(Exists, match=name):  # the way that a storage node takes with --format-if-new
        asyncio.run(prepare(survey([choice], CLUSTER, format_if_new=True), CLUSTER, 1, one_target))
    assert read(loop.path, 0, 1 << 20) == before
    device_format(loop.path, cluster=CLUSTER, targets=[1], force=True)
    assert device_inspect(loop.path).targets == (1,)
    assert blkid(loop.path) == ""
    assert device_check(loop.path, data=True).verdict == "clean"


def test_what_is_in_use_is_refused_also_by_force(make_loop: MakeLoop, tmp_path: Path) -> None:
    loop = make_loop(512)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 isn't installed")
    subprocess.run(["mkfs.ext4", "-q", "-F", loop.path], check=True, capture_output=True)
    if subprocess.run(["mount", loop.path, tmp_path], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user can't mount")
    try:
        with pytest.raises(Busy, match=f"mounted at {tmp_path}"):
            device_format(loop.path, cluster=CLUSTER, targets=[1], force=True)
        with pytest.raises(Busy, match=f"mounted at {tmp_path}"):  # before the cluster is told of a node
            survey([DeviceChoice(loop.path, 0)], CLUSTER, format_if_new=True)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert "ext4" in blkid(loop.path) or shutil.which("blkid") is None


@pytest.mark.parametrize("formatted", [False, True])
def test_a_read_only_device_is_called_that(make_loop: MakeLoop, formatted: bool) -> None:
    loop = make_loop(512)
    if formatted:
        device_format(loop.path, cluster=CLUSTER, targets=[1])
    refusals = [
        lambda: survey([DeviceChoice(loop.path, 0)], CLUSTER, format_if_new=True),
        lambda: device_format(loop.path, cluster=CLUSTER, targets=[1], force=True),
        *([lambda: device_discard(loop.path)] if formatted else []),
    ]
    subprocess.run(["blockdev", "--setro", loop.path], check=True)
    try:
        for refused in refusals:
            with pytest.raises(FfsError, match=r"the device is read-only .*blockdev --setrw") as raised:
                refused()
            assert raised.value.errno == EROFS
            assert raised.value.message.count(loop.path) == 1
    finally:  # it would stay so, for whoever has that number next
        subprocess.run(["blockdev", "--setrw", loop.path], check=True)


def test_the_way_out_of_what_somebody_else_left(make_loop: MakeLoop) -> None:
    loop = make_loop(512)
    write(loop.path, 512, b"EFI PART")
    write(loop.path, 100 << 20, b"old")
    choice = DeviceChoice(loop.path, 0)
    with pytest.raises(Exists, match=f"GPT.*blkdiscard -z {loop.path}") as raised:
        survey([choice], CLUSTER, format_if_new=True)
    assert "--force" not in raised.value.message
    subprocess.run(f"wipefs -qa {loop.path} && blkdiscard -z {loop.path}", shell=True, check=True)
    (plan,) = survey([choice], CLUSTER, format_if_new=True)
    assert plan.found is None


@pytest.mark.parametrize("sector", [512, 4096])
def test_the_commands(make_loop: MakeLoop, sector: int, capsys: pytest.CaptureFixture[str]) -> None:
    loop = make_loop(sector)
    write(loop.path, 100 << 20, random.Random(SEED).randbytes(32 << 20))
    held = loop.allocated()
    line = ["device", "format", loop.path, "--cluster-id", CLUSTER.hex(), "--target", "7", "--target", "9"]
    assert main(line) == 1
    refused = capsys.readouterr().err
    assert "isn't blank" in refused
    assert f"ffs device format --force {loop.path}" in refused
    assert main(["device", "inspect", loop.path]) == 1
    assert "it holds data in the 4 KiB at byte" in capsys.readouterr().err
    assert main([*line, "--force"]) == 0
    if device_survey(loop.path).discard_bytes:
        assert loop.allocated() < held  # all of it was discarded first
    capsys.readouterr()
    assert main(["device", "inspect", loop.path, "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert (fields["block_device"], fields["device_sector"], fields["sector"]) == (True, sector, sector)
    assert (fields["size"], fields["targets"], fields["recovered"]) == (SIZE, [7, 9], True)
    assert fields["stored"]["free_slabs"] == fields["stored"]["slabs"] >= 13
    assert main(["device", "inspect", loop.path]) == 0
    assert f"sectors of {sector}" in capsys.readouterr().out
    assert main(["device", "check", loop.path, "--data"]) == 0
    assert "clean: 0 chunks" in capsys.readouterr().out
    write(loop.path, SIZE // 2, random.Random(SEED).randbytes(16 << 20))  # in slabs that are free
    held = loop.allocated()
    if device_survey(loop.path).discard_bytes:
        assert main(["device", "discard", loop.path]) == 0
        assert "of free space discarded" in capsys.readouterr().out
        assert loop.allocated() < held - (12 << 20)
    assert main(["device", "grow", loop.path]) == 1
    assert "nothing to take in" in capsys.readouterr().err
    loop.resize(SIZE + (64 << 20))
    assert main(["device", "grow", loop.path]) == 0
    assert device_inspect(loop.path).size_bytes == SIZE + (64 << 20)
    loop.resize(SIZE)
    capsys.readouterr()
    assert main(["device", "check", loop.path]) == 1
    said = capsys.readouterr().out
    assert str(SIZE) in said
    assert str(SIZE + (64 << 20)) in said
    for offset in (0, 65536):
        write(loop.path, offset, b"\0" * 4096)
    assert main(["device", "check", loop.path, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["verdict"] == "unjudged"


def test_a_device_is_found_by_its_uuid_wherever_it_is(make_loop: MakeLoop) -> None:
    loops = [make_loop(), make_loop(512)]
    for at, loop in enumerate(loops):
        device_format(loop.path, cluster=CLUSTER, targets=[at + 1])
    uuids = [device_inspect(loop.path).device_uuid.hex() for loop in loops]
    for loop, uuid in zip(loops, uuids, strict=True):
        choice = DeviceChoice(f"uuid:{uuid}", 0, role="kv")
        assert resolve(choice) == DeviceChoice(loop.path, 0, role="kv")
    with pytest.raises(NotFound, match="no block device"):
        resolve(DeviceChoice(f"uuid:{'0' * 32}", 0))
    with pytest.raises(InvalidArgument, match="after uuid:"):
        resolve(DeviceChoice("uuid:17", 0))
    twice = [DeviceChoice(loops[0].path, 0), DeviceChoice(f"uuid:{uuids[0]}", 0)]
    with pytest.raises(InvalidArgument, match="the same device"):
        survey([twice[0], DeviceChoice(f"/dev/../{loops[0].path}", 0)], CLUSTER, format_if_new=False)
    assert [plan.choice.path for plan in survey(twice[:1], CLUSTER, format_if_new=False)] == [loops[0].path]


def test_storage_nodes_on_raw_devices_are_killed_mid_write_and_their_devices_get_other_names(
    make_loop: MakeLoop, tmp_path: Path
) -> None:
    """S17, on block devices: kill -9 of everything, the devices come back under other names, all start; the
    nodes find them by uuid, and nothing that was acknowledged is missing."""
    size = 512 << 20
    loops = [make_loop(sector, size) for sector in (512, 4096)]
    cluster = Cluster(tmp_path, Loopback(), nodes=2, metas=1, devices=[loop.path for loop in loops])
    try:
        cluster.form(replicas=2, chains_per_device=4)
        with (
            ffs.connect(cluster.address, secret=cluster.secret_file) as client,
            client.open("/file", "wb", 0, chunk_size=64 << 10) as file,
        ):
            file.write(bytes(1 << 20))
        writer = Writer(cluster)
        writer.start()
        until(lambda: writer.acknowledged >= 100 or not writer.is_alive(), "it has written")
        assert writer.is_alive(), writer.ended
        for process in cluster.processes.values():
            process.kill()
        writer.join(60)
        assert not writer.is_alive()
        # The kernel takes the rings of the dead apart in the background, and their files with them.
        until(lambda: all(device_survey(loop.path).recovered for loop in loops), "the devices are free")
        reports = [device_check(loop.path, data=True) for loop in loops]
        assert [(report.verdict, report.problems) for report in reports] == [("clean", ())] * 2
        assert all(report.state.journal_used_bytes > 0 for report in reports)
        uuids = [report.state.info.device_uuid.hex() for report in reports]
        files = [loop.file for loop in loops]
        for loop in loops:
            loop.detach()
        moved = [Loop(file, 0, sector) for file, sector in zip(reversed(files), (4096, 512), strict=True)]
        try:
            for at, uuid in enumerate(uuids):
                cluster.processes[f"node{at}"].set_device(f"uuid:{uuid}")
            for process in cluster.processes.values():
                process.start()
            cluster.until_whole()
            with (
                ffs.connect(cluster.address, secret=cluster.secret_file) as client,
                client.open("/file", "rb", 0) as file,
            ):
                # All but the slot that was being written.
                for number in range(writer.acknowledged - 62, writer.acknowledged + 1):
                    assert file.pread(16384, number % 64 * 16384) == _block(number), number
            for process in cluster.processes.values():
                process.end()
            states = {device_survey(loop.path).info.device_uuid.hex() for loop in moved}
            assert states == set(uuids)
        finally:
            for loop in moved:
                loop.detach()
    finally:
        cluster.close()


class Writer(threading.Thread):
    """Overwrites slots of /file in turn until the store is gone."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self.acknowledged = 0
        self.ended: Exception | None = None

    def run(self) -> None:
        try:
            with (
                ffs.connect(
                    self._cluster.address, secret=self._cluster.secret_file, request_timeout=5.0
                ) as client,
                client.open("/file", "r+b", 0) as file,
            ):
                while True:
                    number = self.acknowledged + 1
                    file.pwrite(_block(number), number % 64 * 16384)
                    self.acknowledged = number
        except (FfsError, OSError) as error:
            self.ended = error  # all of it was killed


def _block(number: int) -> bytes:
    return number.to_bytes(8, "little") * 2048
