"""Ranks of one save: one of them publishes, and whichever dies, whenever it does, the others learn of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ffs
from ffs import checkpoint, errors
from ffs.checkpoint import commit
from ffs.checkpoint.alive import Alive
from ffs.checkpoint.commit import Attempt
from ffs.checkpoint.remains import collect_remains, running_name
from ffs.checkpoint.report import RankReport
from ffs.client.client import Client

ROOT = Path(__file__).parents[2]
STATE = {f"t{n}": np.full(3 << 20, n, np.uint8) for n in range(4)}

RANK = """
import os, signal, sys, time
import numpy as np
import ffs
from ffs import checkpoint
from ffs.checkpoint import commit, manager as managers, saving

address, path, dies = sys.argv[1:]
client = ffs.connect(address, session_ttl=1.0)
manager = checkpoint.Manager(
    client, path, ranks=checkpoint.Ranks(1, 2, run="ab"), host_bytes=64 << 20, part_bytes=1 << 20
)

def die(*args, **options):
    print("dying", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def dies_in_the_midst(original):
    def stage(*args, **options):
        for number, staged in enumerate(original(*args, **options)):
            if number == 2:
                die()
            yield staged
    return stage

if dies == "before":
    die()
if dies == "copying":
    managers.stage = dies_in_the_midst(managers.stage)
if dies == "telling":
    commit.Attempt._put = die
if dies == "storing":
    saving.Background._report = die
manager.save(1, {f"t{n}": np.full(3 << 20, n, np.uint8) for n in range(4)})
time.sleep(60)
"""


@pytest.fixture
def others() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("dies", ["before", "copying", "telling", "storing"])
def test_a_rank_that_is_killed_is_noticed_whatever_it_was_doing(
    client: Client, home: str, address: str, others: list[subprocess.Popen[str]], dies: str
) -> None:
    """Between saves, while its copy goes on, before its report, between that and the end of its data: never
    by waiting for ever."""
    with checkpoint.Manager(client, f"{home}/run", host_bytes=64 << 20) as alone:
        alone.save(0, STATE, block=True)
    path = f"{home}/run"
    with checkpoint.Manager(client, path, ranks=checkpoint.Ranks(0, 2, run="ab"), host_bytes=64 << 20) as one:
        other = subprocess.Popen(
            [sys.executable, "-c", RANK, address, path, dies],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
        others.append(other)
        assert other.stdout is not None
        assert other.stdout.readline() == "dying\n"
        assert other.wait() == -signal.SIGKILL
        handle = one.save(1, STATE)
        with pytest.raises(checkpoint.RankFailed, match="rank 1 failed: it ended before"):
            handle.wait(60)
        with pytest.raises(checkpoint.RankFailed):
            one.wait()
        assert one.steps() == [0]
        assert (one.load()["t3"] == 3).all()
    with checkpoint.Manager(client, path):  # the next job's first rank takes the remains away
        assert client.listdir(path) == ["step-0"]


def attempts(client: Client, goal: str, count: int) -> list[Attempt]:
    made = [Attempt(client, goal, "ab12", rank, count) for rank in range(count)]
    for attempt in made:
        attempt.begin()
    return made


EMPTY: dict[str, Any] = {"shards": (), "tensors": {}, "tied": {}, "tree": {"dict": []}, "declared": {}}


def report(attempt: Attempt) -> None:
    attempt.report(RankReport(rank=attempt.rank, ranks=attempt.ranks, **EMPTY))


def test_one_rank_merges_and_publishes_and_the_others_only_learn_of_it(
    client: Client, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = attempts(client, f"{home}/c", 4)
    merged: list[int] = []
    original = commit.merge

    def merge(reports: list[RankReport], *more: Any) -> Any:
        merged.append(len(reports))
        return original(reports, *more)

    monkeypatch.setattr(commit, "merge", merge)
    for attempt in ranks[:3]:
        report(attempt)
        assert attempt.try_publish() is None
    report(ranks[3])
    started = threading.Barrier(4)
    found: list[Any] = [None] * 4

    def look(number: int) -> None:
        started.wait()
        while found[number] is None:
            found[number] = ranks[number].try_publish()

    threads = [threading.Thread(target=look, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert merged == [4]
    assert sorted(each.here for each in found) == [False, False, False, True]
    assert len({each.data for each in found}) == 1
    assert all(each.manifest.ranks == 4 for each in found)
    for attempt in ranks:
        attempt.tidy()
    assert client.listdir(home) == ["c"]


@pytest.mark.parametrize("published", [False, True])
def test_another_rank_takes_over_from_one_that_dies_while_it_publishes(
    client: Client, home: str, published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after its rename; one that was taken for dead by mistake finds what was published."""
    one, other = attempts(client, f"{home}/c", 2)
    report(one)
    report(other)

    class Dies(BaseException):
        pass

    def dies(*_: Any) -> None:
        if published:
            original(client, one.data, one.goal)
        raise Dies

    original = Client.rename_exclusive
    with monkeypatch.context() as patched:
        patched.setattr(Client, "rename_exclusive", dies)
        with pytest.raises(Dies):
            one.try_publish()
    if not published:
        assert other.try_publish() is None  # its lock is held: it may still do it
    one.close()
    mine = other.try_publish()
    assert mine is not None
    assert mine.here is not published
    late = one.try_publish()  # it lives, after all
    assert late is not None
    assert late.data == mine.data
    assert not late.here
    other.tidy()
    assert client.listdir(home) == ["c"]


def test_what_is_told_is_merged_early_and_nothing_is_visible_until_all_is_stored(
    client: Client, home: str
) -> None:
    ranks = attempts(client, f"{home}/c", 3)
    files = [attempt.prepare([f"t{attempt.rank}"])[0] for attempt in ranks]
    for attempt in ranks:
        attempt.claim()
    assert [attempt.publishes for attempt in ranks] == [True, False, False]
    assert not any(attempt.merge_told() for attempt in ranks)
    for attempt in ranks[:2]:
        attempt.tell(RankReport(attempt.rank, 3, **EMPTY))
    assert not ranks[0].merge_told()
    ranks[2].tell(RankReport(2, 3, **EMPTY))
    assert [attempt.merge_told() for attempt in ranks] == [True, False, False]
    there = client.getsize(f"{ranks[0].data}/manifest.json")
    assert there > 0
    for number, attempt in enumerate(ranks):
        assert [each.try_publish() for each in ranks] == [None] * 3
        assert not client.lexists(f"{home}/c")
        client.close_many([files[number]])
        attempt.stored()
    published = ranks[0].try_publish()
    assert published is not None
    assert published.here
    assert len(published.data) == there
    for attempt in ranks[1:]:
        found = attempt.try_publish()
        assert found is not None
        assert not found.here
        assert found.data == published.data
    for attempt in ranks:
        attempt.tidy()
    assert client.listdir(home) == ["c"]
    assert client.listdir(f"{home}/c") == ["manifest.json", "t0", "t1", "t2"]


@pytest.mark.parametrize("merged", [False, True])
def test_another_rank_takes_over_from_one_that_has_begun_to_merge(
    client: Client, home: str, address: str, merged: bool
) -> None:
    """Its manifest is there, or a part of one."""
    with ffs.connect(address) as second:
        one = Attempt(second, f"{home}/c", "ab12", 0, 2)
        other = Attempt(client, f"{home}/c", "ab12", 1, 2)
        for attempt in (one, other):
            attempt.begin()
            attempt.prepare([])
            attempt.claim()
            attempt.tell(RankReport(attempt.rank, 2, **EMPTY))
        if merged:
            assert one.merge_told()
        else:
            assert one._manifest_file is not None
            one._manifest_file.write(b'{"format": "ffs-ch')
            one._manifest_file.flush()
        one.stored()
        other.stored()
        assert other.try_publish() is None  # the first one lives
    found = other.try_publish()
    assert found is not None
    assert found.here
    assert checkpoint.load(client, f"{home}/c") == {}
    other.tidy()
    assert client.listdir(home) == ["c"]


def two_managers(client: Client, path: str) -> tuple[checkpoint.Manager, checkpoint.Manager]:
    """Two ranks in one process."""
    one, other = (
        checkpoint.Manager(client, path, ranks=checkpoint.Ranks(rank, 2, run="ab"), host_bytes=64 << 20)
        for rank in range(2)
    )
    return one, other


def save_where_the_second_is_full(one: checkpoint.Manager, other: checkpoint.Manager) -> None:
    """Both hear of it, by the save and by close."""
    handles = [each.save(1, STATE) for each in (one, other)]
    with pytest.raises(errors.NoSpace):
        handles[1].wait(60)
    with pytest.raises(checkpoint.RankFailed, match=r"rank 1 failed: .*it is full"):
        handles[0].wait(60)
    for each in (one, other):
        with pytest.raises((checkpoint.RankFailed, errors.NoSpace)):
            each.close()


def test_what_fails_behind_its_report_fails_the_save(
    client: Client, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C3, C10: all ranks have told what they will have stored, and the manifest is there."""
    path = f"{home}/run"
    one, other = two_managers(client, path)
    merged = threading.Event()
    original = Attempt._put_manifest, Client.close_many

    def put(self: Attempt, manifest: Any) -> Any:
        found = original[0](self, manifest)
        merged.set()
        return found

    def close(self: Client, files: list[Any]) -> list[Any]:
        assert merged.wait(30)
        found = original[1](self, files)
        full = errors.NoSpace("it is full")
        return [full if ".r1." in file.name else error for file, error in zip(files, found, strict=True)]

    monkeypatch.setattr(Attempt, "_put_manifest", put)
    monkeypatch.setattr(Client, "close_many", close)
    save_where_the_second_is_full(one, other)
    assert client.listdir(path) == []


def test_files_that_were_made_ahead_become_links_or_are_written_as_it_turns_out(
    client: Client, home: str
) -> None:
    """A save makes the files that the one before has written, and not those that it has linked."""
    state = {f"t{n}": np.full(9 << 20, n, np.uint8) for n in range(3)}
    with checkpoint.Manager(client, f"{home}/run", host_bytes=64 << 20) as manager:
        for step, changed in enumerate(([0, 1, 2], [2], [1, 2], [])):
            for n in changed:
                state[f"t{n}"][:] = 10 * step + n
            report = manager.save(step, state).wait(60)
            linked = {shard.file for shard in report.manifest.shards if shard.linked}
            assert linked == {f"t{n}.safetensors" for n in range(3) if n not in changed}
            files = [shard.file for shard in report.manifest.shards]
            assert client.listdir(manager.path_of(step)) == sorted([*files, "manifest.json"])
            loaded = manager.load(step)
            assert all((loaded[name] == value).all() for name, value in state.items())


def test_a_failure_that_cant_be_told_is_told_later(
    client: Client, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank lives and holds its lock: by nothing else would the others know."""
    path = f"{home}/run"
    one, other = two_managers(client, path)
    tried: list[str] = []
    symlink = Client.symlink

    def fails(self: Client, source: str, target: str) -> None:
        if "failed-00001" in target:
            tried.append(target)
            if len(tried) < 3:
                raise errors.Unreachable("nobody answers")
        symlink(self, source, target)

    monkeypatch.setattr(Client, "symlink", fails)
    monkeypatch.setattr(
        other._background, "_report", lambda saving: setattr(saving, "failure", errors.NoSpace("it is full"))
    )
    save_where_the_second_is_full(one, other)
    assert len(tried) == 3
    assert client.listdir(path) == []


def test_a_lock_that_was_lost_with_its_session_is_taken_again(
    client: Client, home: str, address: str
) -> None:
    with ffs.connect(address) as second:
        mine, theirs = Alive(client, f"{home}/run", 0), Alive(second, f"{home}/run", 1)
        mine.ensure()
        assert mine.ended([1]) == []  # not there yet
        theirs.ensure()
        assert mine.ended([1]) == []
        second.core.session().over = True  # as when it wasn't renewed in time
        client.break_locks(f"{home}/run/alive-00001")
        assert mine.ended([1]) == [1]
        theirs.ensure()
        assert mine.ended([1]) == []
        theirs.close()
        assert mine.ended([1]) == [1]
        mine.close()
    assert client.listdir(home) == []


def test_remains_are_collected_when_all_ranks_of_their_run_have_gone(client: Client, home: str) -> None:
    locks = Alive(client, f"{home}/{running_name('ab')}", 0)
    attempt = Attempt(client, f"{home}/step-1", "ab" + "1".zfill(8), 0, 2, alive=locks)
    attempt.begin()
    assert collect_remains(client, home) == []
    locks.let_go()  # as when its process dies
    assert sorted(collect_remains(client, home)) == sorted(
        [attempt.hidden.removeprefix(f"{home}/"), running_name("ab")]
    )
    assert client.listdir(home) == []
