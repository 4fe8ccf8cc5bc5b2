"""Tensors as bytes and back: types, views, ties, destinations (FAULTS C5, C12, C13)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ffs.checkpoint.dtypes import DTYPE_BYTES, NUMPY_NAMES, TORCH_NAMES
from ffs.checkpoint.shard import TensorSpec
from ffs.checkpoint.tensors import Destination, as_tensor, describe
from ffs.errors import InvalidArgument


def _torch(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    count = int(np.prod(shape)) * DTYPE_BYTES[dtype]
    raw = torch.arange(count, dtype=torch.int64).remainder(2 if dtype == "BOOL" else 251).to(torch.uint8)
    return raw.view(getattr(torch, TORCH_NAMES[dtype])).reshape(shape)


@pytest.mark.parametrize("dtype", sorted(TORCH_NAMES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (4, 6)])
def test_torch_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = _torch(dtype, shape)
    source = describe("t", tensor)
    assert source.spec == TensorSpec("t", dtype, shape)
    flat = source.flat()
    assert flat.nbytes == source.spec.nbytes
    back = as_tensor(source.spec, memoryview(bytearray(flat.tobytes())), "torch")
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    fresh = torch.empty_like(tensor)
    destination = Destination(source.spec, fresh)
    destination.buffer[:] = flat
    destination.finish()
    assert torch.equal(fresh.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", sorted(NUMPY_NAMES))
def test_numpy_round_trip(dtype: str) -> None:
    array = np.arange(24).astype(NUMPY_NAMES[dtype]).reshape(2, 3, 4)
    source = describe("t", array)
    assert source.spec.dtype == dtype
    back = as_tensor(source.spec, memoryview(bytearray(source.flat().tobytes())), "numpy")
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_big_endian_is_saved_as_little() -> None:
    array = np.arange(5, dtype=">i4")
    assert describe("t", array).flat().tobytes() == np.arange(5, dtype="<i4").tobytes()
    target = np.zeros(5, dtype=">i4")
    destination = Destination(TensorSpec("t", "I32", (5,)), target)
    destination.buffer[:] = np.arange(5, dtype="<i4").view(np.uint8)
    destination.finish()
    np.testing.assert_array_equal(target, np.arange(5))


def test_a_view_costs_its_own_bytes() -> None:
    """C5: ten elements of a big storage."""
    big = torch.arange(10_000_000, dtype=torch.float32)
    source = describe("t", big[::1_000_000])
    assert source.spec.nbytes == 40
    assert source.flat().nbytes == 40
    assert source.flat().tobytes() == big[::1_000_000].clone().numpy().tobytes()


def test_ties_are_found_and_only_real_ones() -> None:
    """C12."""
    weight = torch.nn.Parameter(torch.ones(4, 4))
    same = describe("a", weight).identity
    assert describe("b", weight.data).identity == same
    assert describe("c", weight.T).identity != same
    assert describe("d", weight[:2]).identity != same
    assert describe("e", weight.clone()).identity != same
    array = np.ones((4, 4), np.float32)
    assert describe("a", array).identity == describe("b", array[:]).identity
    assert describe("a", array).identity != describe("b", array.T).identity
    # Empty ones have no memory to share, wherever their pointers point.
    assert describe("x", torch.empty(0)).identity != describe("y", torch.empty(0)).identity


def test_transposed_conjugated_and_strided_are_saved_by_value() -> None:
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert describe("t", base.T).flat().tobytes() == base.T.contiguous().numpy().tobytes()
    value = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    assert describe("t", value.conj()).flat().tobytes() == value.conj().resolve_conj().numpy().tobytes()


def test_loading_into_a_strided_destination() -> None:
    base = torch.zeros(4, 3)
    destination = Destination(TensorSpec("t", "F32", (3, 4)), base.T)
    destination.buffer[:] = np.arange(12, dtype=np.float32).view(np.uint8)
    destination.finish()
    assert torch.equal(base.T, torch.arange(12, dtype=torch.float32).reshape(3, 4))
    array = np.zeros((4, 3), np.float32)
    into = Destination(TensorSpec("t", "F32", (3, 4)), array.T)
    into.buffer[:] = np.arange(12, dtype=np.float32).view(np.uint8)
    into.finish()
    np.testing.assert_array_equal(array.T, np.arange(12).reshape(3, 4))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, "0-dim"),
        ({"inner": torch.ones(1)}, "flatten"),
        ("text", "0-dim"),
        (None, "0-dim"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(value: object, words: str) -> None:
    with pytest.raises(TypeError, match=f"(?s)'layer.x'.*{words}"):
        describe("layer.x", value)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, dtype=torch.complex128),
        torch.ones(2, device="meta"),
        torch.ones(2, 2).to_sparse(),
        np.ones(2, np.complex128),
        np.array(["a"], dtype=object),
        np.zeros(2, dtype=[("a", "i4")]),
    ],
    ids=["complex128", "meta", "sparse", "np-complex128", "object", "record"],
)
def test_what_safetensors_cannot_hold_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidArgument, match=r"layer\.x"):
        describe("layer.x", value)


def test_bf16_into_numpy_says_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match="framework='torch'"):
        as_tensor(TensorSpec("t", "BF16", (1,)), memoryview(bytearray(2)), "numpy")


def test_wrong_destination_is_refused_by_name() -> None:
    spec = TensorSpec("w", "F32", (2, 2))
    for bad in (torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.float64), np.zeros((4,), np.float32)):
        with pytest.raises(InvalidArgument, match="'w'"):
            Destination(spec, bad)
    frozen = np.zeros((2, 2), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgument, match="read-only"):
        Destination(spec, frozen)
    with pytest.raises(TypeError, match="'w'"):
        Destination(spec, [1, 2])
