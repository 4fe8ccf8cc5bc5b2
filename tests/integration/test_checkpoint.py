"""Checkpoints on a real cluster: round trips, verification, and nothing half made (FAULTS C3-C17)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from ffs import checkpoint, errors
from ffs.checkpoint.dtypes import TORCH_NAMES
from ffs.client.client import Client
from ffs.client.ior import Completion, Ior

ROOT = Path(__file__).parents[2]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert set(one) == set(other)
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert one[name].shape == other[name].shape, name
        assert bits(one[name]) == bits(other[name]), name


def model(megabytes: float = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = int(megabytes * 256)
    return {
        "layer.0.weight": torch.randn(rows, 512, generator=generator),
        "layer.1.weight": torch.randn(rows, 512, generator=generator).to(torch.bfloat16),
        "layer.0.bias": torch.randn(77, generator=generator),
        "step": torch.tensor(1000),
        "mask": torch.rand(1001, generator=generator) > 0.5,
        "nothing": torch.empty(0, 3),
    }


def test_every_type_and_shape(client: Client, home: str) -> None:
    """C13."""
    raw = torch.arange(48, dtype=torch.int64).remainder(2).to(torch.uint8)
    state = {
        name: raw.view(getattr(torch, kind)).reshape(2, -1).clone() for name, kind in TORCH_NAMES.items()
    }
    state |= {f"{name}.scalar": tensor.reshape(-1)[0] for name, tensor in state.items()}
    checkpoint.save(client, f"{home}/c", state)
    same(state, checkpoint.load(client, f"{home}/c"))


def test_directories_above_are_made(client: Client, home: str) -> None:
    state = {"w": torch.arange(5)}
    checkpoint.save(client, f"{home}/runs/7/step-1", state)
    same(state, checkpoint.load(client, f"{home}/runs/7/step-1"))


def test_strided_views_and_ties(client: Client, home: str) -> None:
    """C5, C12."""
    big = torch.arange(1_000_000, dtype=torch.float32)
    shared = torch.nn.Parameter(torch.randn(100, 10))
    state = {"view": big[::100_000], "turned": shared.detach().T, "embed": shared, "head": shared}
    manifest = checkpoint.save(client, f"{home}/c", state)
    assert manifest.nbytes == 40 + 4000 + 4000
    assert manifest.tied == {"head": "embed"}
    loaded = checkpoint.load(client, f"{home}/c")
    assert loaded["head"] is loaded["embed"]
    same({k: v.detach() for k, v in state.items()}, loaded)


def test_the_library_safetensors_reads_the_shards(client: Client, home: str) -> None:
    state = model()
    manifest = checkpoint.save(client, f"{home}/c", state, part_bytes=2 << 20)
    assert len(manifest.shards) > 1
    found: dict[str, torch.Tensor] = {}
    for shard in manifest.shards:
        with client.open(f"{home}/c/{shard.file}", "rb") as file:
            data = file.read()
        assert len(data) == shard.bytes
        assert (8 + int.from_bytes(data[:8], "little")) % 4096 == 0
        found |= safetensors.torch.load(data)
    found["layer.0.weight"] = torch.cat(
        [tensor for name, tensor in sorted(found.items()) if name.startswith("layer.0.weight[")]
    )
    same(state, {name: tensor for name, tensor in found.items() if "[" not in name})
    same(state, checkpoint.load(client, f"{home}/c"))
    assert sorted(client.listdir(home)) == ["c"]


def test_into_what_is_there(client: Client, home: str) -> None:
    state = model()
    checkpoint.save(client, f"{home}/c", state)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    into["layer.0.weight"] = torch.zeros(512, state["layer.0.weight"].shape[0]).T
    returned = checkpoint.load(client, f"{home}/c", into)
    assert returned["step"] is into["step"]
    same(state, into)


def test_names_types_and_shapes_are_compared_before_anything_is_read(client: Client, home: str) -> None:
    state = {"a": torch.ones(3), "b": torch.ones(4)}
    checkpoint.save(client, f"{home}/c", state)
    untouched = torch.zeros(3)
    for into in (
        {"a": untouched},
        {"a": untouched, "b": torch.zeros(5)},
        {"a": untouched, "b": state["b"], "c": untouched},
    ):
        with pytest.raises(errors.InvalidArgument, match=r"'[bc]'"):
            checkpoint.load(client, f"{home}/c", into)
    assert untouched.sum() == 0
    checkpoint.load(client, f"{home}/c", {"a": untouched}, strict=False)
    assert torch.equal(untouched, state["a"])
    checkpoint.save(client, f"{home}/d", {**state, "step": 7})
    into: dict[str, Any] = {"a": torch.zeros(3), "step": 0}
    checkpoint.load(client, f"{home}/d", into, strict=False)
    assert torch.equal(into.pop("a"), state["a"])
    assert into == {"step": 7}


def test_numpy_comes_back_as_numpy(client: Client, home: str) -> None:
    state = {"x": np.arange(5000, dtype=np.float64).reshape(50, 100), "y": np.float32(2.5)}
    checkpoint.save(client, f"{home}/c", state)
    loaded = checkpoint.load(client, f"{home}/c")
    assert isinstance(loaded["x"], np.ndarray)
    np.testing.assert_array_equal(loaded["x"], state["x"])
    assert checkpoint.load(client, f"{home}/c", framework="torch")["x"].dtype == torch.float64


def test_loaded_tensors_are_ones_own(client: Client, home: str) -> None:
    """C17: neither another load nor the end of the client changes them."""
    state = model(1)
    checkpoint.save(client, f"{home}/c", state)
    first = checkpoint.load(client, f"{home}/c")
    first["layer.0.weight"].add_(1)
    same(state, checkpoint.load(client, f"{home}/c"))
    assert torch.equal(first["layer.0.weight"], state["layer.0.weight"] + 1)


def test_a_flipped_bit_is_found_and_named(client: Client, home: str) -> None:
    state = model(1)
    manifest = checkpoint.save(client, f"{home}/c", state)
    (entry,) = manifest.tensors["layer.0.bias"].parts
    with client.open(f"{home}/c/{manifest.shards[entry.shard].file}", "r+b") as file:
        file.seek(entry.offset + 9)
        byte = file.read(1)[0]
        file.seek(entry.offset + 9)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(errors.ChecksumMismatch, match=r"layer\.0\.bias"):
        checkpoint.load(client, f"{home}/c")
    with pytest.raises(errors.ChecksumMismatch, match=r"layer\.0\.bias"):
        checkpoint.load(client, f"{home}/c", {n: torch.zeros_like(t) for n, t in state.items()})


def test_a_shard_that_is_cut_off_is_named(client: Client, home: str) -> None:
    manifest = checkpoint.save(client, f"{home}/c", model(1))
    path = f"{home}/c/{manifest.shards[0].file}"
    client.truncate(path, manifest.shards[0].bytes - 1)
    with pytest.raises(errors.Damaged, match=r"manifest says"):
        checkpoint.load(client, f"{home}/c")
    client.remove(path)
    with pytest.raises(errors.NotFound):
        checkpoint.load(client, f"{home}/c")


def test_what_is_no_checkpoint(client: Client, home: str) -> None:
    with pytest.raises(errors.NotFound, match=r"manifest\.json"):
        checkpoint.load(client, home)
    with client.open(f"{home}/manifest.json", "w") as file:
        file.write("{")
    with pytest.raises(errors.Damaged):
        checkpoint.load(client, home)


# --- nothing half made ------------------------------------------------------------------------------


def test_a_name_that_is_taken_stays_what_it_was(client: Client, home: str) -> None:
    checkpoint.save(client, f"{home}/c", {"a": torch.ones(3)})
    with pytest.raises(errors.Exists, match="another path"):
        checkpoint.save(client, f"{home}/c", {"a": torch.zeros(3)})
    assert torch.equal(checkpoint.load(client, f"{home}/c")["a"], torch.ones(3))
    assert client.listdir(home) == ["c"]


@pytest.mark.parametrize(
    "state",
    [
        {"a": torch.ones(2), "bad": object()},
        {"bad": torch.ones(2).to_sparse()},
        {"bad": {frozenset(): torch.ones(1)}},
        {"bad": torch.ones(2, dtype=torch.complex128)},
    ],
)
def test_bad_states_are_refused_before_anything_is_made(
    client: Client, home: str, state: dict[Any, Any]
) -> None:
    with pytest.raises((TypeError, errors.InvalidArgument), match=r"bad"):
        checkpoint.save(client, f"{home}/c", state)
    assert client.listdir(home) == []


@pytest.mark.parametrize("when", [0, 1, 3])
def test_a_write_that_fails_is_raised_and_nothing_is_visible(
    client: Client, home: str, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    """C3: the full device, told to one of many requests in flight."""
    calls = 0
    original = Ior.wait

    def wait(self: Ior, least: int = 1, timeout: float | None = None) -> list[Completion]:
        nonlocal calls
        done = original(self, least, timeout)
        if calls <= when < calls + len(done):
            failed = done[when - calls]._replace(error=errors.NoSpace("no space left on the device"))
            done[when - calls] = failed
        calls += len(done)
        return done

    monkeypatch.setattr(Ior, "wait", wait)
    with pytest.raises(errors.NoSpace):
        checkpoint.save(client, f"{home}/c", model(32))
    monkeypatch.undo()
    assert client.listdir(home) == []
    checkpoint.save(client, f"{home}/c", model(1))


def test_a_process_that_is_killed_leaves_nothing_visible(client: Client, home: str, address: str) -> None:
    """C6, for the first checkpoint: kill -9 while it is being written."""
    code = f"""
import sys, torch, ffs
from ffs import checkpoint
client = ffs.connect({address!r}, request_timeout=300)
state = {{str(i): torch.full((1 << 20,), float(i)) for i in range(64)}}
print("begin", flush=True)
for i in range(1000):
    checkpoint.save(client, f"{home}/c{{i}}", state)
    print(i, flush=True)
"""
    for lines in (1, 2, 4):
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        for _ in range(lines):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for name in client.listdir(home):
            if name.startswith("."):
                continue
            loaded = checkpoint.load(client, f"{home}/{name}")
            assert all(bool((loaded[str(i)] == i).all()) for i in range(64))
            client.rmtree(f"{home}/{name}")


def test_two_savers_of_one_name(client: Client, home: str) -> None:
    results: list[object] = [None, None]

    def one(number: int) -> None:
        try:
            results[number] = checkpoint.save(
                client, f"{home}/c", {"a": torch.full((1 << 18,), float(number))}
            )
        except errors.Exists as error:
            results[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [n for n, r in enumerate(results) if isinstance(r, checkpoint.Manifest)]
    assert len(winners) == 1
    assert (checkpoint.load(client, f"{home}/c")["a"] == winners[0]).all()
    assert client.listdir(home) == ["c"]


# --- what it costs ------------------------------------------------------------------------------------


def test_requests_are_large(client: Client, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C15, C16: bytes and requests are counted."""
    counted: list[Any] = []
    original = Ior.close

    def close(self: Ior) -> None:
        counted.append((self.kind, self.stats()))
        original(self)

    monkeypatch.setattr(Ior, "close", close)
    manifest = checkpoint.save(client, f"{home}/c", model(32))
    checkpoint.load(client, f"{home}/c")
    total = sum(shard.bytes for shard in manifest.shards)
    (write, written), (read, got) = counted
    assert (write, read) == ("write", "read")
    assert written.bytes_written == total
    assert manifest.nbytes <= got.bytes_read <= total
    for stats in (written, got):
        assert stats.submitted <= total // (1 << 20) + len(manifest.shards)
        assert stats.max_inflight > 4
    counted.clear()
    bias = torch.zeros(77)
    checkpoint.load(client, f"{home}/c", {"layer.0.bias": bias}, strict=False)
    assert counted[0][1].bytes_read == 77 * 4


def test_many_saves_leave_memory_and_descriptors_flat(client: Client, home: str) -> None:
    """C7."""
    state = model(4)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def one(number: int) -> None:
        checkpoint.save(client, f"{home}/c{number}", state)
        checkpoint.load(client, f"{home}/c{number}")
        client.rmtree(f"{home}/c{number}")

    for number in range(5):
        one(number)
    before, files = resident(), len(os.listdir("/proc/self/fd"))
    for number in range(5, 30):
        one(number)
    assert len(os.listdir("/proc/self/fd")) <= files + 2
    assert resident() <= before + (64 << 20)


def test_the_manifest_is_plain_json_with_all_that_was_promised(client: Client, home: str) -> None:
    checkpoint.save(client, f"{home}/c", {"a": torch.ones(2, 3)})
    with client.open(f"{home}/c/manifest.json") as file:
        fields = json.load(file)
    assert fields["tensors"]["a"]["shape"] == [2, 3]
    assert set(fields["tensors"]["a"]["parts"][0]) == {"shard", "offset", "bytes", "hash"}
