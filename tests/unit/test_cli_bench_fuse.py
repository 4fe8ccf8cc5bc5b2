"""`ffs bench fuse`: its figures, what it says of a machine that lacks something, and that mounts go."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ffs.cli.benchmark import fuse, fuse_mounts
from ffs.cli.benchmark.protocol import Round, Slice
from ffs.errors import AccessDenied, FfsError, Unsupported


def test_a_line_says_what_the_device_would_have_reached() -> None:
    case = fuse.CASES[0]
    slices = tuple(Slice(4096.0 * rate, 1) for rate in (10, 50, 100, 101))
    rounds = [Round(Slice(4096.0 * 40, 1), slices)] * 3
    result = fuse.result_of(case, "fuse-4k-rand-qd32-bindfs-disk", rounds, 0, 2, {}, noisy=False)
    assert (result.ffs, result.floor, result.ratio, result.unit) == (40, 10, 4, "op/s")
    assert (result.goal, result.ok) == (6.0, False)
    assert result.more["device"] == 100
    assert result.more["device_ratio"] == 0.4
    assert result.more["device_to_mount"] == 10
    other = fuse.result_of(case, "fuse-4k-rand-qd32-passthrough-disk", rounds, 1, 2, {}, noisy=False)
    assert (other.ratio, other.ok) == (0.8, False)


def test_names() -> None:
    assert len(set(fuse.NAMES)) == 8
    assert set(fuse.GOALS) <= set(fuse.NAMES)


def test_files_are_cold_when_a_slice_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    (tmp_path / "a").write_bytes(b"x")
    real = os.posix_fadvise

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        order.append("cold")
        real(descriptor, offset, length, advice)

    def reader(seconds: float) -> Slice:
        order.append("read")
        return Slice(1, seconds)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    fuse.cold(reader, [tmp_path / "a", tmp_path / "a"])(0.1)
    assert order == ["cold", "cold", "read"]


def test_what_is_missing_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_mounts, "FUSE_DEVICE", tmp_path / "none")
    with pytest.raises(Unsupported, match="no FUSE"):
        fuse_mounts.check_bindfs()
    monkeypatch.setattr(fuse_mounts, "FUSE_DEVICE", tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(AccessDenied, match="root"):
        fuse_mounts.check_bindfs()
    monkeypatch.setattr(os, "access", lambda *_: True)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "bindfs" else name)
    with pytest.raises(Unsupported, match="apt install bindfs"):
        fuse_mounts.check_bindfs()
    monkeypatch.setattr(fuse_mounts, "EXAMPLE", tmp_path / "none.c")
    assert fuse_mounts.build_passthrough(tmp_path) == (
        None,
        f"{tmp_path}/none.c isn't here: apt install libfuse3-dev",
    )


def test_a_program_that_does_not_mount_tells_its_last_words(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    with (
        pytest.raises(FfsError, match=r"sh ended with status 3: no way"),
        fuse_mounts.mounted(["sh", "-c", "echo no way; exit 3"], mount, tmp_path / "log"),
    ):
        raise AssertionError("nothing is mounted there")
    assert not mount.exists()
