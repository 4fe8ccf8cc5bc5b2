"""The layout of a shard: read by the standard library safetensors as the independent peer."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from ffs.checkpoint.dtypes import DTYPE_BYTES, NUMPY_NAMES
from ffs.checkpoint.shard import ALIGN_BYTES, TensorSpec, plan_shard
from ffs.errors import InvalidArgument

_specs = st.lists(
    st.builds(
        TensorSpec,
        name=st.text(min_size=1, max_size=12).filter(lambda n: n != "__metadata__"),
        dtype=st.sampled_from(sorted(NUMPY_NAMES)),
        shape=st.lists(st.sampled_from([0, 1, 2, 3, 7, 64, 1024]), max_size=2).map(tuple),
    ),
    max_size=12,
    unique_by=lambda spec: spec.name,
)


@given(_specs)
def test_no_gaps_and_big_whole_pages_first(specs: list[TensorSpec]) -> None:
    plan = plan_shard(specs)
    assert len(plan.header) % ALIGN_BYTES == 0
    at = len(plan.header)
    pages_over = False
    for placed in plan.tensors:
        assert placed.begin == at
        assert placed.end - placed.begin == placed.spec.nbytes
        at = placed.end
        whole_pages = placed.spec.nbytes % ALIGN_BYTES == 0
        assert not (whole_pages and pages_over), "a tensor of whole pages stands after the others"
        pages_over = not whole_pages
        assert placed.begin % DTYPE_BYTES[placed.spec.dtype] == 0
        if whole_pages:
            assert placed.begin % ALIGN_BYTES == 0
    assert plan.nbytes == at


@given(_specs, st.randoms(use_true_random=False))
def test_the_safetensors_library_reads_it(specs: list[TensorSpec], draw: object) -> None:
    plan = plan_shard(specs, {"origin": "a test"})
    rng = np.random.default_rng(draw.randrange(1 << 32))  # type: ignore[attr-defined]
    # Bytes 0 and 1 only: every value of them is a valid bool too.
    data = {spec.name: rng.integers(0, 2, spec.nbytes, dtype=np.uint8).tobytes() for spec in specs}
    file = plan.header + b"".join(data[placed.spec.name] for placed in plan.tensors)
    for name, tensor in dict(safetensors.deserialize(file)).items():
        spec = next(s for s in specs if s.name == name)
        assert tuple(tensor["shape"]) == spec.shape
        assert bytes(tensor["data"]) == data[name]


def test_metadata_and_padding_stand_in_the_header() -> None:
    plan = plan_shard([TensorSpec("a", "F32", (2,))], {"tied": "x"})
    length = int.from_bytes(plan.header[:8], "little")
    assert length == len(plan.header) - 8
    parsed = json.loads(plan.header[8:])
    assert parsed == {
        "__metadata__": {"tied": "x"},
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    }


def test_bad_names() -> None:
    spec = TensorSpec("a", "F32", (1,))
    with pytest.raises(InvalidArgument, match="twice"):
        plan_shard([spec, spec])
    with pytest.raises(InvalidArgument, match="__metadata__"):
        plan_shard([TensorSpec("__metadata__", "F32", (1,))])
