"""FfsStager under dcp.async_save, by threads and by processes, and plain DCP through fsspec."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from ffs import checkpoint, errors
from ffs.checkpoint import persist
from ffs.checkpoint.dcp import FfsStorageReader, FfsStorageWriter
from ffs.checkpoint.stager import FfsStager
from ffs.client.client import Client

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:.*TypedStorage is deprecated"
)


def some_state(number: float = 0.0) -> dict[str, Any]:
    return {
        "model": {
            "w": torch.full((1 << 18,), number),
            "e": torch.empty(0, 3),
            "half": torch.ones(7).bfloat16(),
        },
        "turned": torch.arange(200.0).reshape(10, 20).T + number,
        "words": ["a", {"b": number}],
    }


def save(state: Any, stager: FfsStager, client: Client, path: str) -> Any:
    response = dcp.async_save(
        state, storage_writer=FfsStorageWriter(client, path), async_stager=stager, no_dist=True
    )
    return getattr(response, "upload_completion", response)


def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    go = threading.Event()
    original = persist.ClusterWriter.write

    def write(self: persist.ClusterWriter, directory: str, staged: Any) -> None:
        assert go.wait(60)
        original(self, directory, staged)

    monkeypatch.setattr(persist.ClusterWriter, "write", write)
    return go


def test_the_state_may_change_when_it_is_staged_and_a_third_save_waits(
    client: Client, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1, C4 under DCP; the memory is given back when DCP has done with it."""
    go = held_up(monkeypatch)
    stager = FfsStager(host_bytes=(2 << 20) + (64 << 10) + (1 << 18))
    state = some_state()
    uploads = []
    for step in range(2):
        state["model"]["w"].fill_(step)
        state["words"][1]["b"] = step
        uploads.append(save(state, stager, client, f"{home}/c{step}"))
    state["model"]["w"].fill_(2)
    third = threading.Thread(target=lambda: uploads.append(save(state, stager, client, f"{home}/c2")))
    third.start()
    third.join(0.5)
    assert len(uploads) == 2
    go.set()
    third.join(60)
    for upload in uploads:
        upload.result(60)
    for step in range(3):
        into = some_state(-1.0)
        dcp.load(into, storage_reader=FfsStorageReader(client, f"{home}/c{step}"), no_dist=True)
        assert (into["model"]["w"] == step).all()
        assert into["words"][1]["b"] == min(step, 1)
    uploads.clear()
    gc.collect()
    stager._give_back()
    assert stager._pool is not None
    assert stager._pool.used == 0
    stager.close()


def test_a_state_that_is_held_for_ever_is_told(client: Client) -> None:
    stager = FfsStager(host_bytes=2 << 20, patience_s=0.3)
    kept = stager.stage(some_state())
    with pytest.raises(errors.Busy, match="planner"):
        stager.stage(some_state())
    del kept
    stager.stage(some_state())
    with pytest.raises(errors.InvalidArgument, match="host_bytes"):
        stager.stage({"w": torch.zeros(1 << 20)})
    stager.close()


def test_views_ties_and_other_values_are_staged_by_value() -> None:
    """C5, C12."""
    whole = torch.arange(1 << 20, dtype=torch.float32)
    state = {
        "view": whole[5:15],
        "one": whole[:8],
        "tied": whole[:8],
        "list": [torch.tensor(3), (torch.tensor(True), {"n": [1]})],
        "conj": torch.tensor([1 + 2j]).conj(),
    }
    stager = FfsStager()
    staged = stager.stage(state)
    whole.zero_()
    state["list"][1][1]["n"].append(2)
    assert staged["view"].tolist() == list(range(5, 15))
    assert staged["one"] is staged["tied"]
    assert int(staged["list"][0]) == 3
    assert bool(staged["list"][1][0])
    assert staged["list"][1][1] == {"n": [1]}
    assert staged["conj"].tolist() == [1 - 2j]
    assert stager._pool is not None
    assert stager._pool.used == 4096
    stager.close()


def test_an_update_waits_and_the_rest_is_copied_at_once(
    client: Client, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ffs.checkpoint import stager as staging

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    go = threading.Event()
    original = staging._copy

    def copy(copies: Any, memory: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(60)
        original(copies, memory)

    monkeypatch.setattr(staging, "_copy", copy)
    stager = FfsStager(host_bytes=4 << 20)
    stager.guard(optimizer)
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    response: Any = dcp.async_save(
        {"model": model},
        storage_writer=FfsStorageWriter(client, f"{home}/c"),
        async_stager=stager,
        no_dist=True,
    )
    assert not response.staging_completion.done()
    model(torch.randn(8, 64)).square().mean().backward()  # changes the running statistics
    timer = threading.Timer(0.2, go.set)
    timer.start()
    optimizer.step()
    response.staging_completion.result(1)
    response.upload_completion.result(60)
    timer.join()
    loaded = checkpoint.load(client, f"{home}/c")
    assert all(torch.equal(loaded[f"model.{name}"], tensor) for name, tensor in wanted.items())
    go.clear()
    future = stager.stage({"model": model.state_dict()})
    with torch.no_grad():
        model[0].weight.add_(1)
    go.set()
    assert isinstance(future.exception(60), checkpoint.TornSnapshot)
    del future
    stager.close()


PROCESS = """
import os, sys, torch, torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import ffs
from ffs.checkpoint.dcp import FfsStorageReader, FfsStorageWriter
from ffs.checkpoint.stager import FfsStager

address, home, store = sys.argv[1:4]

def main():
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    client = ffs.connect(address)
    mesh = init_device_mesh("cpu", (1,))
    stager = FfsStager(host_bytes=4 << 20)
    value = torch.zeros(1 << 18)
    for step in range(3):
        value.fill_(step)
        state = {"w": value, "d": distribute_tensor(value[:100].reshape(10, 10), mesh, [Shard(0)]), "n": step}
        response = dcp.async_save(
            state,
            storage_writer=FfsStorageWriter(client, f"{home}/c{step}"),
            async_stager=stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        value.fill_(-1)
        response.result(120)
    for step in range(3):
        into = {"w": torch.zeros(1 << 18), "n": -1}
        into["d"] = distribute_tensor(torch.zeros(10, 10), mesh, [Shard(0)])
        dcp.load(into, storage_reader=FfsStorageReader(client, f"{home}/c{step}"))
        assert (into["w"] == step).all() and (into["d"].to_local() == step).all() and into["n"] == step
    stager.close()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def test_a_process_writes_what_was_staged(client: Client, home: str, address: str, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(PROCESS)
    done = subprocess.run(
        [sys.executable, str(script), address, home, str(tmp_path / "store")],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


def test_plain_dcp_through_fsspec(client: Client, home: str, address: str) -> None:
    """DCP's own format in the store, by a URL alone; async_save, too."""
    pytest.importorskip("fsspec")
    state = some_state(3.0)
    dcp.save(state, checkpoint_id=f"ffs://{address}{home}/plain", no_dist=True)
    assert sorted(client.listdir(f"{home}/plain")) == [".metadata", "__0_0.distcp"]
    stager = FfsStager()
    dcp.async_save(
        state, checkpoint_id=f"ffs://{address}{home}/later", no_dist=True, async_stager=stager
    ).result(60)  # type: ignore[union-attr]
    for name in ("plain", "later"):
        into = some_state(-1.0)
        dcp.load(into, checkpoint_id=f"ffs://{address}{home}/{name}", no_dist=True)
        assert torch.equal(into["model"]["w"], state["model"]["w"])
        assert torch.equal(into["turned"], state["turned"])
        assert into["words"] == state["words"]
    stager.close()
