"""States as tensors and a tree, and back; ranks' trees and reports joined."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffs.checkpoint.manifest import Part, Shard, Tensor
from ffs.checkpoint.report import RankReport, joined, merge
from ffs.checkpoint.state import (
    flatten,
    names_in,
    own_tree,
    put_back,
    shared_tree,
    unflatten,
    with_rank,
    without_prefix,
)
from ffs.errors import Damaged, InvalidArgument

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 80), 1 << 80),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(allow_nan=False, allow_infinity=False),
)
keys = st.one_of(
    st.text(max_size=4),
    st.integers(),
    st.booleans(),
    st.none(),
    st.tuples(st.text(max_size=2), st.integers()),
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


def typed(value: Any) -> Any:
    """Compares 1, 1.0 and True as different."""
    if isinstance(value, dict):
        return [(typed(k), typed(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [typed(each) for each in value]
    return type(value).__name__, value


@given(st.dictionaries(st.text(max_size=5), trees, max_size=4))
def test_plain_values_come_back_as_they_were(state: dict[str, Any]) -> None:
    flat = flatten(state)
    assert not flat.tensors
    tree = json.loads(json.dumps(flat.tree, allow_nan=False)) if flat.tree is not None else None
    assert typed(unflatten(tree, {}, "m")) == typed(state)


def test_special_values() -> None:
    state = {
        "nan": math.nan,
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "set": {3, 1, 2},
        "ordered": OrderedDict(a=1),
        "bytes": bytearray(b"\0\xff"),
    }
    back = unflatten(flatten(state).tree, {}, "m")
    assert math.isnan(back.pop("nan"))
    assert back == {**{k: v for k, v in state.items() if k != "nan"}, "bytes": b"\0\xff"}
    assert isinstance(back["size"], torch.Size)


def test_tensors_are_named_by_their_place_and_never_confused() -> None:
    one, two, three = (torch.full((2,), float(n)) for n in range(3))
    state = {"a": {"b": one, 0: three}, "a.b": two, "l": [one, (two,)]}
    flat = flatten(state)
    assert list(flat.tensors) == ["a.b", "a.0", "a.b~2", "l.0", "l.1.0"]
    assert names_in(flat.tree) == set(flat.tensors)
    back = unflatten(flat.tree, flat.tensors, "m")
    assert back["a"]["b"] is one
    assert back["a.b"] is two
    assert back["a"][0] is three
    assert back["l"][1] == (two,)
    assert flatten({"x": one, "y.z": two}).tree is None


def test_what_cant_be_stored_is_named() -> None:
    for bad in ({"a": {"b": object()}}, {"a": {"b": lambda: 0}}, {"a": {"b": {frozenset(): 1}}}):
        with pytest.raises(TypeError, match=r"a\.b"):
            flatten(bad)
    cycle: dict[str, Any] = {}
    cycle["a"] = cycle
    with pytest.raises(InvalidArgument, match="cycle"):
        flatten(cycle)
    with pytest.raises(TypeError, match="int"):
        flatten(3)


@pytest.mark.parametrize(
    "tree", [[1], {"dict": 3}, {"dict": [["a"]]}, {"no": 1}, {"tensor": "b"}, {"a": 1, "b": 2}, {"int": "x"}]
)
def test_a_damaged_tree_is_told(tree: Any) -> None:
    with pytest.raises(Damaged, match="some/manifest"):
        unflatten(tree, {"a": 1}, "some/manifest")


class Loader:
    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": np.arange(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        assert len(state["seen"]) == self.at


def test_objects_values_and_lists_are_put_back_in_place() -> None:
    saved = {"loader": Loader(5), "n": 1, "more": {"deep": [1, 2, 3]}, "opts": [{"lr": 1.0}]}
    flat = flatten(saved)
    assert list(flat.tensors) == ["loader.seen"]
    deep, options = [9], {"lr": 0.0}
    into: dict[str, Any] = {"loader": Loader(0), "n": 0, "more": {"deep": deep}, "opts": [options]}
    put_back(into, flat.tree, flat.tensors, "m")
    assert into["loader"].at == 5
    assert (into["n"], deep, options) == (1, [1, 2, 3], {"lr": 1.0})
    assert into["more"]["deep"] is deep
    assert unflatten(flat.tree, flat.tensors, "m")["loader"]["at"] == 5


def test_what_one_rank_has_stays_apart() -> None:
    state = with_rank({"n": 1}, 3, {"seed": np.arange(3)})
    flat = flatten(state)
    assert list(flat.tensors) == ["@3.seed"]
    assert unflatten(shared_tree(flat.tree), {}, "m") == {"n": 1}
    own = without_prefix(own_tree(flat.tree, 3), "@3.")
    assert names_in(own) == {"seed"}
    assert own_tree(flat.tree, 2) is None
    with pytest.raises(InvalidArgument, match="@0"):
        with_rank({"@0": 1}, 0, {})


def report(rank: int, tree: Any = None, **tensors: tuple[int, int]) -> RankReport:
    """Rows [begin, end) of tensors of four rows that this rank has stored."""
    stored = {
        name: Tensor("U8", (4, 1), (Part(0, 0, end - begin, "0" * 64, (begin, 0), (end - begin, 1)),))
        for name, (begin, end) in tensors.items()
        if end > begin
    }
    declared: dict[str, tuple[str, tuple[int, ...]]] = {name: ("U8", (4, 1)) for name in tensors}
    return RankReport(rank, 2, (Shard(f"f{rank}", 100),), stored, {}, tree, declared)


def test_reports_make_one_manifest_whatever_their_order() -> None:
    one = report(0, {"dict": [["n", 1]]}, a=(0, 2))
    two = report(1, {"dict": [["n", 2], ["m", 3]]}, a=(2, 4))
    manifest = merge([two, one], 7, "c")
    assert manifest == merge([one, two], 7, "c")
    assert [part.shard for part in manifest.tensors["a"].parts] == [0, 1]
    assert manifest.tree == {"dict": [["n", 1], ["m", 3]]}
    assert joined({"list": [1]}, {"list": [2]}) == {"list": [1]}


def test_parts_that_make_no_whole_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="lacks some"):
        merge([report(0, a=(0, 2)), report(1, a=(3, 4))], 7, "c")
    with pytest.raises(InvalidArgument, match=r"'b' of rank 0 was stored by no rank.*per_rank"):
        merge([report(0, a=(0, 2), b=(0, 0)), report(1, a=(2, 4))], 7, "c")
    other = report(1, a=(2, 4))
    odd = RankReport(
        1, 2, other.shards, {"a": Tensor("I8", (4, 1), other.tensors["a"].parts)}, {}, None, other.declared
    )
    with pytest.raises(InvalidArgument, match="rank 1"):
        merge([report(0, a=(0, 2)), odd], 7, "c")
    with pytest.raises(InvalidArgument, match="two ranks"):
        merge([report(0, a=(0, 2)), RankReport(1, 2, report(0).shards, {}, {}, None, {})], 7, "c")
