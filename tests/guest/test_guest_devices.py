"""`ffs device` and the engine on NVMe devices of 512 and 4096-byte blocks, by the kernel's own driver."""

from __future__ import annotations

import json
import os
import random

import pytest
from guest_mapper import run
from guest_writer import CLUSTER, TARGETS, Writer

from ffs._native.device import device_check, device_inspect, device_survey
from ffs.cli import main
from storage_server.config import DeviceChoice
from storage_server.devices import resolve

DEVICES = {512: "/dev/disk-block512", 4096: "/dev/disk-block4096"}
SIZE = 1 << 30
OLD_AT = 700 << 20


def read(path: str, offset: int, size: int) -> bytes:
    with open(path, "rb", buffering=0) as device:
        os.posix_fadvise(device.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return os.pread(device.fileno(), size, offset)


@pytest.mark.parametrize("block", [512, 4096])
def test_format_inspect_write_kill_check_discard(block: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = DEVICES[block]
    run("blkdiscard", path)
    old = random.Random(block).randbytes(1 << 20)
    with open(path, "r+b") as device:
        os.pwrite(device.fileno(), old, OLD_AT)
        os.pwrite(device.fileno(), b"EFI PART", block)
        os.fsync(device.fileno())
    assert read(path, OLD_AT, len(old)) == old
    line = ["device", "format", path, f"--cluster-id={CLUSTER.hex()}"]
    line += [f"--target={target}" for target in TARGETS]
    assert main(line) == 1
    assert "GPT" in capsys.readouterr().err
    assert main([*line, "--force"]) == 0
    assert read(path, OLD_AT, len(old)) == bytes(len(old))  # all of it was discarded first
    state = device_survey(path)
    assert (state.block_device, state.device_sector_bytes, state.info.sector_bytes) == (True, block, block)
    assert state.device_bytes == SIZE
    assert state.discard_bytes > 0
    assert state.flushes, state.cache_reason  # the device says that its cache is volatile
    assert main(["device", "inspect", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["targets"] == TARGETS
    uuid = device_inspect(path).device_uuid.hex()
    choice = DeviceChoice(f"uuid:{uuid}", 0)
    assert os.path.realpath(resolve(choice).path) == os.path.realpath(path)

    writer = Writer(path, {})
    try:
        assert writer.verified() == 0
        writer.wait_for(20)
        used = device_check(path)
        assert used.verdict == "unjudged"
        assert "in use" in used.reason
    finally:
        writer.kill()
    report = device_check(path, data=True)
    assert (report.verdict, report.problems) == ("clean", ()), report.reason
    assert report.state.journal_used_bytes > 0
    again = Writer(path, writer.acknowledged)
    try:
        assert again.verified() == len(writer.acknowledged) > 0
    finally:
        again.kill()

    with open(path, "r+b") as device:
        os.pwrite(device.fileno(), old, OLD_AT)  # in a slab that is free
        os.fsync(device.fileno())
    capsys.readouterr()
    assert main(["device", "discard", path]) == 0
    assert "of free space discarded" in capsys.readouterr().out
    assert read(path, OLD_AT, len(old)) == bytes(len(old))
    # Which looks for a fifth of a second: a ring that ends mustn't keep the device for longer.
    report = device_check(path, data=True)
    assert report.verdict == "clean", report.reason
