"""Power cuts of a real block device under the engine: acknowledged updates must survive each.

dm-log-writes records what the engine sent to an emulated NVMe device; each power cut that the record allows
is as real as one of the device (guest_write_log.py). dm-flakey loses or fails writes from some moment on.
"""

from __future__ import annotations

import random
import subprocess
from errno import EIO

from guest_mapper import Mapped, linear
from guest_write_log import FLUSH, FUA, cut, read_log, replay
from guest_writer import Writer, prepare

from ffs._native.device import device_check

DEVICE = "/dev/disk-block512"
SIZE, LOG_SIZE = 256 << 20, 480 << 20
SEED = 31
GAVE_UP = 9  # the exit status of a worker all of whose updates failed


def zeros(path: str) -> None:
    subprocess.run(["blkdiscard", path], check=True)


def judge(path: str, acknowledged: dict[int, int]) -> None:
    report = device_check(path, data=True)
    assert (report.verdict, report.problems) == ("clean", ()), report.reason
    writer = Writer(path, acknowledged)
    try:
        assert writer.verified() == len(acknowledged)
    finally:
        writer.kill()


def test_power_cuts_at_any_place_of_the_write_log() -> None:
    zeros(DEVICE)
    rng = random.Random(SEED)
    data, log = linear(DEVICE, 0, SIZE), linear(DEVICE, SIZE, LOG_SIZE)
    with Mapped("data", data) as below, Mapped("log", log) as logged:
        marks: list[dict[int, int]] = [{}]
        table = f"0 {SIZE // 512} log-writes {below.path} {logged.path}"
        with Mapped("recorded", table) as recorded:
            prepare(recorded.path)
            writer = Writer(recorded.path, {})
            try:
                assert writer.verified() == 0
                for number in range(1, 5):
                    writer.wait_for(number * 12)
                    marks.append(writer.pause())
                    recorded.message("mark", f"acknowledged-{number}")
                    writer.resume()
            finally:
                writer.kill()
        entries = read_log(logged.path)
        assert any(entry.flags & (FLUSH | FUA) for entry in entries)
        places = [at for at, entry in enumerate(entries) if entry.mark.startswith("acknowledged-")]
        assert [entries[at].mark for at in places] == [f"acknowledged-{n}" for n in range(1, 5)]
        with Mapped("cut", linear(DEVICE, SIZE + LOG_SIZE, SIZE)) as image:
            for begin, end in zip(places, [*places[1:], len(entries)], strict=True):
                at = rng.randint(begin + 1, end)
                number = places.index(begin) + 1
                zeros(image.path)
                kept = cut(entries, at, rng)
                assert replay(logged.path, kept, image.path) > 0
                print(f"cut after {at} of {len(entries)}: {len(kept)} kept, {marks[number]}")
                judge(image.path, marks[number])


def test_a_device_that_drops_writes_from_a_moment_on_keeps_what_it_had_acknowledged() -> None:
    zeros(DEVICE)
    whole = linear(DEVICE, 0, SIZE)
    with Mapped("flaky", whole) as flaky:
        prepare(flaky.path)
        known: dict[int, int] = {}
        for count in (7, 20):
            writer = Writer(flaky.path, known)
            try:
                assert writer.verified() == len(known)
                writer.wait_for(count)
                known = writer.pause()
                flaky.load(f"0 {SIZE // 512} flakey {DEVICE} 0 0 3600 1 drop_writes")
                writer.resume()
                writer.wait_for(writer.count + 5)  # a device that lies is believed
            finally:
                writer.kill()
            flaky.load(whole)
            judge(flaky.path, known)


def test_a_device_that_fails_writes_is_given_up_and_keeps_what_it_had_acknowledged() -> None:
    zeros(DEVICE)
    whole = linear(DEVICE, 0, SIZE)
    with Mapped("failing", whole) as failing:
        prepare(failing.path)
        writer = Writer(failing.path, {})
        try:
            assert writer.verified() == 0
            writer.wait_for(10)
            failing.load(f"0 {SIZE // 512} flakey {DEVICE} 0 0 3600 1 error_writes")
            assert writer.ended() == GAVE_UP
        finally:
            writer.kill()
        failed = sorted(line.split()[1:] for line in writer.said if line.startswith("failed "))
        assert failed == [[str(key), str(EIO)] for key in range(6)]
        failing.load(whole)
        judge(failing.path, writer.acknowledged)
