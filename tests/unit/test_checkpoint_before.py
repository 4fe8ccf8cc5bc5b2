"""Which file of the checkpoint before is linked: by what this rank has stored, else by the whole manifest."""

from __future__ import annotations

import pytest

from ffs.checkpoint import saving as savings
from ffs.checkpoint.manifest import Manifest, Part, Shard, Tensor
from ffs.checkpoint.persist import Before
from ffs.checkpoint.saving import Saving


def tensor(shard: int, digest: str) -> Tensor:
    return Tensor("F32", (2,), (Part(shard, 4096, 8, digest * 64),))


MINE = (Shard("a", 4104), Shard("b", 4104))
TENSORS = {"a": tensor(0, "1"), "b": tensor(1, "2")}
WHOLE = Manifest((Shard("c", 4104), *MINE), {"c": tensor(0, "3"), "a": tensor(1, "1"), "b": tensor(2, "2")})


def key(name: str, digest: str) -> tuple[tuple[str, str, tuple[int, ...], tuple[int, ...], str], ...]:
    return ((name, "F32", (0,), (2,), digest * 64),)


def test_files_are_found_and_the_manifest_is_asked_for_only_where_a_file_came_from_another_rank() -> None:
    asked: list[str] = []

    def whole() -> Manifest:
        asked.append("whole")
        return WHOLE

    before = Before("/step-1", MINE, TENSORS, whole)
    assert before.file_of(key("a", "1"), "a") == "a"
    assert before.file_of(key("b", "9"), "b") is None  # it has changed
    assert asked == []
    assert before.file_of(key("c", "3"), "c") == "c"
    assert before.file_of(key("c", "4"), "c") is None
    assert asked == ["whole"]


def test_unchanged_are_those_whose_parts_have_the_same_bytes() -> None:
    before = Before("/step-1", MINE, TENSORS, lambda: WHOLE)
    now = {"a": tensor(0, "1"), "b": tensor(1, "9"), "new": tensor(0, "1")}
    assert before.unchanged(now) == {"a"}


@pytest.mark.parametrize(("ranks", "waits"), [(1, False), (4, True)])
def test_hashing_waits_for_the_copies_of_other_ranks_of_this_host(
    ranks: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(savings, "ranks_here", lambda: ranks)
    monkeypatch.setattr(savings.time, "monotonic", lambda: 100.0)
    saving = Saving(None, None, None)  # type: ignore[arg-type]
    saving.be_quiet(0.05)
    assert saving.quiet_until_s == (100.05 if waits else 0.0)
    saving.be_quiet(60.0)
    assert saving.quiet_until_s == (100.2 if waits else 0.0)
