"""When a server moved data, from looks at what it has written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ffs.cli.benchmark.moving import MUCH_BYTES, Watch, span_s, written_bytes

MIB = 1 << 20


def test_the_span_is_from_the_first_to_the_last_step_that_is_large() -> None:
    steps = [0, 4096, MIB, 3 * MIB, 4096, 0, MIB, MIB - 1, 0]
    looks = [(i * 0.5, 7 + sum(steps[: i + 1])) for i in range(len(steps))]
    assert span_s(looks) == 6 * 0.5 - 1 * 0.5  # from the look before the first one


def test_one_step_counts_from_the_look_before_it_and_little_ones_for_nothing() -> None:
    assert span_s([(1.0, 0), (1.25, MUCH_BYTES)]) == 0.25
    assert span_s([(1.0, 0), (2.0, MUCH_BYTES - 1), (3.0, 2 * MUCH_BYTES - 2)]) == 0.0
    assert span_s([]) == span_s([(1.0, 5)]) == 0.0


def test_a_process_is_seen_to_write(tmp_path: Path) -> None:
    before = written_bytes(os.getpid())
    watch = Watch(os.getpid())
    watch.start()
    with (tmp_path / "file").open("wb", buffering=0) as file:
        file.write(bytes(4 * MIB))
        os.fsync(file.fileno())
    took = watch.end()
    if written_bytes(os.getpid()) < before + 4 * MIB:
        pytest.skip("this file system's writes aren't counted (tmpfs)")
    assert took > 0.0


def test_a_process_that_is_gone_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        written_bytes(2**22 + 1)
