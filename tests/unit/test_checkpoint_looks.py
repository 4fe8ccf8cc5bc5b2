"""A plan is made once for states that look the same, and every state's own bytes are copied by it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from ffs.checkpoint import snapshot
from ffs.checkpoint.looks import Looks, look
from ffs.checkpoint.plan import GROUP_BYTES, Part, files_of
from ffs.checkpoint.snapshot import Planner, stage
from ffs.checkpoint.staging import Pool


def state(fill: float = 1.0) -> dict[str, Any]:
    base = torch.full((64, 64), fill)
    return {
        "a": torch.full((300, 7), fill),
        "tied": base,
        "again": base,
        "turned": torch.full((5, 9), fill).t(),
        "np": np.full((11, 3), fill),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(fill),
    }


def staged(planner: Planner, tensors: dict[str, Any], pool: Pool) -> dict[str, bytes]:
    """By name, as the files hold them."""
    found = {}
    for file in stage(planner.plan(tensors, pool.nbytes), pool):
        memory = file.image()
        for part, placed in file.placed():
            found[part.name] = memory[placed.begin : placed.end].tobytes()
        del memory
        file.region.release()
    return found


def as_bytes(value: Any) -> bytes:
    return np.ascontiguousarray(value.numpy() if isinstance(value, torch.Tensor) else value).tobytes()


def test_the_second_state_is_copied_by_the_first_ones_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, planner = Pool(1 << 20), Planner(0, 1)
    described: list[str] = []
    original = snapshot.describe

    def describe(name: str, value: object) -> Any:
        described.append(name)
        return original(name, value)

    monkeypatch.setattr(snapshot, "describe", describe)
    first, second = state(1.0), state(2.0)
    for tensors in (first, first, second):
        found = staged(planner, tensors, pool)
        assert sorted(found) == sorted(set(tensors) - {"again"})
        for name, data in found.items():
            assert data == as_bytes(tensors[name]), name
    assert described == list(first)
    first["a"].fill_(7.0)
    assert staged(planner, first, pool)["a"] == as_bytes(first["a"])


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(a=s["a"].double()),
        lambda s: s.update(a=s["a"][:-1]),
        lambda s: s.update(a=torch.ones(7, 300).t()),
        lambda s: s.update(again=s["tied"].clone()),
        lambda s: s.update(more=torch.ones(3)),
        lambda s: s.update(np=s["np"].astype(np.float32)),
        lambda s: s.update(np=np.asfortranarray(s["np"])),
        lambda s: s["a"].set_(torch.ones(300, 7)),
        lambda s: s["a"].set_(torch.ones(20, 105)),
    ],
)
def test_another_look_is_another_plan(change: Any) -> None:
    pool, planner = Pool(1 << 20), Planner(0, 1)
    tensors = state()
    staged(planner, tensors, pool)
    change(tensors)
    found = staged(planner, tensors, pool)
    for name, data in found.items():
        assert data == as_bytes(tensors[name]), name
    wanted = {"again"} if tensors["again"] is tensors["tied"] else set()
    assert set(tensors) - set(found) == wanted


def test_a_plan_doesnt_keep_the_state_alive() -> None:
    pool, planner = Pool(1 << 20), Planner(0, 1)
    tensors = {"a": torch.ones(1000), "turned": torch.ones(4, 5).t()}
    staged(planner, tensors, pool)
    watches = [weakref.ref(each) for each in tensors.values()]
    tensors.clear()
    gc.collect()
    assert [watch() for watch in watches] == [None, None]


def test_the_same_objects_are_known_again() -> None:
    looks = Looks()
    tensors = {"a": torch.ones(3), "b": np.ones(4)}
    first, again = looks.look(tensors), looks.look(tensors)
    assert again.key is first.key
    assert again.tensors[0] is tensors["a"]
    assert looks.look({**tensors, "a": torch.ones(3)}).key == first.key
    assert looks.look({"b": tensors["b"], "a": tensors["a"]}).key != first.key
    assert look({"x": np.float32(3)}).pointers[0] != 0  # numbers of numpy have no weak references
    assert looks.look({"x": np.float32(3)}).key == looks.look({"x": np.float32(4)}).key


def part(name: str, nbytes: int) -> Part:
    return Part(name, "U8", (nbytes,), (0,), (nbytes,))


def test_small_tensors_that_stay_the_same_have_files_of_their_own() -> None:
    parts = [part(f"m.{n}.w", 1 << 20) for n in range(10)]
    still = frozenset({"m.3.w", "m.7.w"})
    files = files_of(parts, 0, 1, still=still)
    kinds = [{each.name in still for each in file.parts} for file in files]
    assert sorted(map(len, kinds)) == [1] * len(kinds)
    assert sum(len(file.parts) for file in files) == 10
    assert len({file.file for file in files}) == len(files)


def test_a_group_ends_with_its_layer_when_it_is_half_full() -> None:
    piece = GROUP_BYTES // 8
    parts = [part(f"m.{layer}.{n}.w", piece) for layer in ("a.1", "a.2", "a.3") for n in ("x", "y", "z")]
    groups = [[each.name for each in file.parts] for file in files_of(parts, 0, 1)]
    layers = ["m.a.1", "m.a.1", "m.a.1", "m.a.2", "m.a.2", "m.a.2"]
    assert [name[:5] for name in groups[0]] == layers
    assert [name[:5] for name in groups[1]] == ["m.a.3"] * 3
