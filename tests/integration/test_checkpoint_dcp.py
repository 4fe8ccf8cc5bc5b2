"""torch.distributed.checkpoint on ffs, and ranks that are processes: any layout into any other
(FAULTS C11, C14)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ffs import checkpoint, errors
from ffs.checkpoint.dcp import FfsStorageReader, FfsStorageWriter
from ffs.client.client import Client

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:.*TypedStorage is deprecated"
)


def some_state() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "model": {"w": torch.randn(3000, 1000), "b": torch.randn(7), "e": torch.empty(0, 3)},
        "turned": torch.randn(40, 50).T,
        "half": torch.randn(30).to(torch.bfloat16),
        "step": 12,
        "words": ["a", {"b": 1.5}],
    }


def zeros(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeros(value) for key, value in state.items()}
    return [zeros(each) for each in state] if isinstance(state, list) else None


def test_dcp_saves_and_loads(client: Client, home: str) -> None:
    state = some_state()
    dcp.save(state, storage_writer=FfsStorageWriter(client), checkpoint_id=f"{home}/c", no_dist=True)
    into = zeros(state)
    dcp.load(into, storage_reader=FfsStorageReader(client, f"{home}/c"), no_dist=True)
    assert torch.equal(into["model"]["w"], state["model"]["w"])
    assert torch.equal(into["turned"], state["turned"])
    assert into["half"].dtype == torch.bfloat16
    assert (into["step"], into["words"]) == (12, ["a", {"b": 1.5}])
    # It is a checkpoint like any other.
    plain = checkpoint.load(client, f"{home}/c")
    assert torch.equal(plain["model.w"], state["model"]["w"])
    assert client.listdir(home) == ["c"]
    with pytest.raises(CheckpointException, match="is there already"):
        dcp.save(state, storage_writer=FfsStorageWriter(client, f"{home}/c"), no_dist=True)


def test_dcp_saves_in_the_background(client: Client, home: str) -> None:
    state = some_state()
    writer = FfsStorageWriter(client, f"{home}/c", host_bytes=4 << 20)
    future = dcp.async_save(state, storage_writer=writer, no_dist=True)
    getattr(future, "upload_completion", future).result()
    into = zeros(state)
    dcp.load(into, storage_reader=FfsStorageReader(client, f"{home}/c"), no_dist=True)
    assert torch.equal(into["model"]["w"], state["model"]["w"])


def test_dcp_loads_what_a_manager_saved(client: Client, home: str) -> None:
    state = {"model": {"w": torch.randn(100, 30)}, "step": 3}
    checkpoint.save(client, f"{home}/c", state)
    into = {"model": {"w": torch.zeros(100, 30)}}
    dcp.load(into, storage_reader=FfsStorageReader(client, f"{home}/c"), no_dist=True)
    assert torch.equal(into["model"]["w"], state["model"]["w"])  # type: ignore[index]


class Surprise:
    def __reduce__(self) -> Any:
        return (exec, ("import os; os.environ['FFS_TEST_SURPRISE'] = 'ran'",))


def test_an_object_that_could_run_code_is_refused_unless_trusted(client: Client, home: str) -> None:
    """C14."""
    dcp.save({"x": Surprise()}, storage_writer=FfsStorageWriter(client, f"{home}/c"), no_dist=True)
    os.environ.pop("FFS_TEST_SURPRISE", None)
    with pytest.raises(CheckpointException, match="trusted=True") as caught:
        dcp.load({"x": None}, storage_reader=FfsStorageReader(client, f"{home}/c"), no_dist=True)
    assert "weights_only" in str(caught.value)
    assert "FFS_TEST_SURPRISE" not in os.environ
    dcp.load({"x": None}, storage_reader=FfsStorageReader(client, f"{home}/c", trusted=True), no_dist=True)
    assert os.environ.pop("FFS_TEST_SURPRISE") == "ran"


def test_a_failed_write_leaves_nothing(client: Client, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C3."""
    from ffs.checkpoint import persist

    def write(self: persist.ClusterWriter, directory: str, staged: Any) -> None:
        raise errors.NoSpace("no space left on the device")

    monkeypatch.setattr(persist.ClusterWriter, "write", write)
    with pytest.raises(CheckpointException, match="no space"):
        dcp.save(some_state(), storage_writer=FfsStorageWriter(client, f"{home}/c"), no_dist=True)
    assert not client.exists(f"{home}/c")


RANK = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed import checkpoint as dcp
import ffs
from ffs import checkpoint
from ffs.checkpoint.dcp import FfsStorageReader, FfsStorageWriter

rank, count, address, home, store = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
client = ffs.connect(address)
torch.manual_seed(0)
shapes = {"rows": (37, 11), "columns": (5, 1000), "both": (6, 6), "one": (3,)}
whole = {name: torch.randn(*shape) for name, shape in shapes.items()}
mesh = init_device_mesh("cpu", (count,))
places = {"rows": [Shard(0)], "columns": [Shard(1)], "both": [Replicate()], "one": [Shard(0)]}
state = {name: distribute_tensor(tensor, mesh, places[name]) for name, tensor in whole.items()}
state["plain"] = torch.arange(10)

with checkpoint.Manager(client, f"{home}/run", keep=2) as manager:
    own = {"seed": torch.tensor(rank)}
    report = manager.save(1, {"t": state}, per_rank=own).wait(120)
    into = {"t": {name: torch.zeros_like(tensor) for name, tensor in state.items()}}
    mine = {"seed": torch.tensor(-1)}
    manager.load(into=into, per_rank=mine)
    assert int(mine["seed"]) == rank
    for name, tensor in into["t"].items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        wanted = state[name].to_local() if isinstance(tensor, DTensor) else state[name]
        assert torch.equal(local, wanted), name

dcp.save({"t": state}, storage_writer=FfsStorageWriter(client, f"{home}/dcp"))
other = {
    name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(tensor.ndim - 1)])
    for name, tensor in whole.items()
}
for path in ("dcp", "run/step-1"):
    into = {"t": {name: tensor.clone() for name, tensor in other.items()}}
    dcp.load(into, storage_reader=FfsStorageReader(client, f"{home}/{path}"))
    for name, tensor in into["t"].items():
        assert torch.equal(tensor.full_tensor(), whole[name]), (path, name)
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_that_are_processes(client: Client, home: str, address: str, tmp_path: Path) -> None:
    """C11: sharded by rows and columns over three processes, uneven; loaded whole, and sharded otherwise."""
    count = 3
    line = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*line, str(rank), str(count), address, home, str(tmp_path / "store")],
            env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    errors_of = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * count, errors_of
    torch.manual_seed(0)
    for path in (f"{home}/dcp", f"{home}/run/step-1"):
        found = checkpoint.load(client, path)
        tensors = found["t"] if "t" in found else {k.removeprefix("t."): v for k, v in found.items()}
        assert torch.equal(tensors["plain"], torch.arange(10))
        torch.manual_seed(0)
        for name, shape in (("rows", (37, 11)), ("columns", (5, 1000)), ("both", (6, 6)), ("one", (3,))):
            assert torch.equal(tensors[name], torch.randn(*shape)), name
    assert sorted(client.listdir(f"{home}/run")) == ["step-1"]
