"""Local copies of checkpoints, without a cluster: whole or not there, wherever the process dies."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ffs.checkpoint import scratch
from ffs.checkpoint.near import near_files, spans
from ffs.checkpoint.persist import Written, hash_parts
from ffs.checkpoint.report import RankReport, merge
from ffs.checkpoint.scratch import Scratch
from ffs.checkpoint.snapshot import plan_state, stage
from ffs.checkpoint.staging import Pool

STEPS = ("open", "mkdir", "pwrite", "ftruncate", "fsync", "link", "rename", "unlink", "rmdir", "close")


def state(step: int) -> dict[str, Any]:
    return {
        "frozen": np.arange(9000, dtype=np.int16),
        "hot": np.full(20000, step, np.uint8),
        "small": np.full(100, step, np.int16),
    }


def copy_to(root: Path, step: int) -> RankReport:
    pool = Pool(1 << 20)
    disk = Scratch(str(root), "ab", 0, 1, keep=2)
    plan = plan_state(state(step), 0, 1, pool.nbytes * 4)
    written = Written()
    copying = disk.begin(step)
    for staged in stage(plan, pool):
        hash_parts(staged, "xxh3-128")
        copying.write(staged)
        written.add(staged, False)
        staged.region.release()
    report = RankReport(
        0, 1, tuple(written.shards), written.tensors, plan.tied, None, plan.declared, "xxh3-128"
    )
    copying.finish(report)
    disk.close()
    return report


def dies_after(root: Path, step: int, calls: int) -> int:
    """How a child ended that made a copy and was killed before its call of that number; 0 if it had fewer."""
    child = os.fork()
    if not child:
        left = [calls]
        try:
            for name in STEPS:
                original = getattr(os, name)

                def counted(*args: Any, original: Any = original, **options: Any) -> Any:
                    left[0] -= 1
                    if left[0] < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return original(*args, **options)

                setattr(os, name, counted)
            copy_to(root, step)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def whole(root: Path, step: int, report: RankReport) -> bool:
    """Every part of it, against the hashes."""
    manifest = merge([report], step, "here")
    files = near_files(str(root), "ab", step, manifest).files
    if not files:
        return False
    assert sorted(files) == sorted(shard.file for shard in manifest.shards)
    for tensor in manifest.tensors.values():
        for part in tensor.parts:
            data = Path(files[manifest.shards[part.shard].file]).read_bytes()
            assert xxhash.xxh3_128_hexdigest(data[part.offset : part.offset + part.bytes]) == part.hash
    return True


def test_killed_at_any_point_a_copy_is_whole_or_not_there(tmp_path: Path) -> None:
    """The one that is being replaced, the third that lets the first go, and what is linked, too."""
    reports = {step: copy_to(tmp_path / "example", step) for step in (1, 2, 3)}
    for step in (1, 2):
        copy_to(tmp_path / "before", step)
    killed = calls = 0
    seen = set()
    while True:
        root = tmp_path / f"at-{calls}"
        shutil.copytree(tmp_path / "before", root)
        end = dies_after(root, 3, calls)
        assert end in (0, -9)
        steps = Scratch(str(root), "ab", 0, 1, 2).steps()
        seen.add(tuple(steps))
        assert steps in ([1, 2], [1, 2, 3], [2, 3])
        assert all(whole(root, step, reports[step]) == (step in steps) for step in (1, 2, 3))
        if end == 0:
            break
        killed += 1
        copy_to(root, 3)  # whoever comes next
        assert sorted(os.listdir(root / "ab" / "rank-00000-of-00001")) == ["lock", "step-2", "step-3"]
        calls += 1
        assert calls < 500
    assert killed >= 15
    assert seen == {(1, 2), (1, 2, 3), (2, 3)}


def test_a_file_system_without_direct_io_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.pwrite
    refused = []

    def pwrite(fd: int, data: Any, offset: int) -> int:
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(22, "Invalid argument")
        return original(fd, data[: 3 * 4096 + 100], offset)  # and short writes

    monkeypatch.setattr(os, "pwrite", pwrite)
    report = copy_to(tmp_path, 1)
    assert whole(tmp_path, 1, report)


def test_a_disk_that_takes_no_page_any_more_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 100)
    with pytest.raises(OSError, match="no space"):
        copy_to(tmp_path, 1)
    assert Scratch(str(tmp_path), "ab", 0, 1, 2).steps() == []


@given(st.integers(0, 20000), st.integers(0, 40000), st.integers(0, 8192))
def test_spans_cover_and_only_whole_pages_are_direct(offset: int, length: int, address: int) -> None:
    found = list(spans(offset, length, address))
    assert sum(end - begin for begin, end, _ in found) == length
    at = offset
    for begin, end, direct in found:
        assert begin == at
        at = end
        if direct:
            assert begin % 4096 == end % 4096 == (address + begin - offset) % 4096 == 0


def test_a_list_of_another_format_is_no_copy(tmp_path: Path) -> None:
    copy_to(tmp_path, 1)
    path = tmp_path / "ab" / "rank-00000-of-00001" / "step-1"
    assert scratch.read_copy(str(path)) is not None
    text = (path / scratch.FILE_NAME).read_text()
    (path / scratch.FILE_NAME).write_text(text.replace('"version":1', '"version":2'))
    assert scratch.read_copy(str(path)) is None
