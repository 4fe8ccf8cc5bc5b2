"""The examples for Lightning and Megatron-Core against their real base classes, where these are installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ffs import errors
from ffs.checkpoint.hold import held
from ffs.client.client import Client

ROOT = Path(__file__).parents[2]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@pytest.mark.skipif(not installed("lightning"), reason="lightning isn't installed")
@pytest.mark.filterwarnings("ignore")
def test_lightning(client: Client, home: str) -> None:
    plugin: Any = example("lightning_ffs").FfsCheckpointIO(client)
    state = {
        "state_dict": {"w": torch.randn(100, 30)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}],
        "epoch": 1,
        "hyper_parameters": {"width": 64, "name": "x"},
    }
    path = f"{home}/epoch=1.ckpt"
    for epoch in (1, 2):  # the second one replaces the first
        plugin.save_checkpoint({**state, "epoch": epoch}, path)
    for each in (path, f"ffs://{client.address}{path}"):
        loaded = plugin.load_checkpoint(each, map_location="cpu")
        assert torch.equal(loaded["state_dict"]["w"], state["state_dict"]["w"])  # type: ignore[index, call-overload]
        assert (loaded["epoch"], loaded["hyper_parameters"]) == (2, state["hyper_parameters"])
        assert loaded["optimizer_states"][0]["param_groups"] == [{"lr": 0.1}]
    with held(client, path), pytest.raises(errors.Busy):
        plugin.remove_checkpoint(path)
    plugin.remove_checkpoint(path)
    assert client.listdir(home) == []
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(path)


MEGATRON = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[6])
rank, count, address, home, directory = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=count)
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
import ffs, megatron_ffs

client = ffs.connect(address)
whole = torch.arange(80, dtype=torch.float32).reshape(8, 10)
rows, columns = 8 // count, 10 // count

def state(full, axis):
    piece = full.chunk(count, axis)[rank].contiguous().clone()
    return {"w": ShardedTensor.from_rank_offsets("w", piece, (axis, rank, count)), "step": 7}

directory += "/iter_1"
import os
if rank == 0:
    os.mkdir(directory)
dist.barrier()
save = megatron_ffs.FfsSaveShardedStrategy(client, home)
load = megatron_ffs.FfsLoadShardedStrategy(client, home)
dist_checkpointing.save(state(whole, 0), directory, sharded_strategy=save)
for axis in (0, 1):
    found = dist_checkpointing.load(state(torch.zeros_like(whole), axis), directory, sharded_strategy=load)
    assert torch.equal(found["w"], whole.chunk(count, axis)[rank]), axis
    assert found["step"] == 7
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not installed("megatron"), reason="megatron-core isn't installed")
def test_megatron(client: Client, home: str, address: str, tmp_path: Path) -> None:
    """Two ranks; saved by rows, loaded by rows and by columns."""
    line = [sys.executable, "-W", "ignore", "-c", MEGATRON]
    ranks = [
        subprocess.Popen(
            [*line, str(rank), "2", address, home, str(tmp_path), str(ROOT / "examples")],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert client.listdir(home) == ["iter_1"]
