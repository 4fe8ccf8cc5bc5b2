"""Loads that ranks share: what several want is read once, whoever fails fails all, nobody waits for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ffs import checkpoint, errors
from ffs.client.client import Client

ROOT = Path(__file__).parents[2]
WORLD = 4

RANK = """
import functools, json, os, signal, sys, time
import numpy as np
import torch
import torch.distributed as dist
import ffs
from ffs import checkpoint
from ffs.checkpoint import circle, passing
from ffs.client.ior import Ior

rank, world, address, path, rendezvous = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
own = dist.new_group(list(range(world)), backend="gloo")
client = ffs.connect(address)
manager = checkpoint.Manager(client, path, ranks=checkpoint.Ranks(rank, world, run="ab"))
read = [0]
close = Ior.close
def counted(self):
    if self.kind == "read":
        read[0] += self.stats().bytes_read
    close(self)
Ior.close = counted
passing.rounds = functools.partial(passing.rounds, round_bytes=16 << 20)

def zeros():
    state = {f"w{n}": torch.zeros(1024, 1024) for n in range(6)}
    return {**state, "deep": torch.zeros(3 << 20, dtype=torch.uint8), "odd": torch.zeros(777), "n": 0}

def right(name, tensor):
    return bool((np.asarray(tensor).reshape(-1)[:4096].astype(int) == ord(name[-1])).all())

def say(**told):
    print(json.dumps(told), flush=True)

def attempt(group=None, step=7, into=None):
    read[0] = 0
    try:
        with_group = checkpoint.Ranks(rank, world, run="ab", group=group)
        manager.ranks = with_group
        found = manager.load(step, into=into, share=True)
    except Exception as error:
        say(error=type(error).__name__, text=str(error), read=read[0])
        return None
    say(read=read[0], right=all(right(k, v) for k, v in found.items() if k != "n"), n=found.get("n"))
    return found

# all want all, into what they have
attempt(into=zeros())

# one wants less, one has strides, one has nothing yet, one wants another box
state = zeros()
if rank == 0:
    state = {"w0": state["w0"], "odd": state["odd"]}
if rank == 1:
    state = {k: v.t().contiguous().t() if k[0] == "w" else v for k, v in state.items()}
read[0] = 0
if rank == 0:
    found = manager.load(7, into=state, strict=False, share=True)
elif rank == 2:
    found = manager.load(None, share=True)
elif rank == 3:
    half = torch.zeros(1024, 2048)
    state["w5"] = half[:, ::2]
    found = manager.load(7, into=state, share=True)
    assert (half[:, 1::2] == 0).all()
else:
    found = manager.load(7, into=state, share=True)
say(read=read[0], right=all(right(k, v) for k, v in found.items() if k != "n"))

# one can't read any more in the midst of it
original = passing._Rounds._read
def fails(self, number, batch):
    if number == 1:
        raise OSError("the disk is on fire")
    original(self, number, batch)
if rank == 2:
    passing._Rounds._read = fails
attempt(into=zeros())
passing._Rounds._read = original

# a bit flips between two ranks
exchange = circle.Circle.exchange
def flips(self, out, into):
    exchange(self, out, into)
    for sender, data in into:
        if sender == 3:
            data[1000] ^= 1
if rank == 1:
    circle.Circle.exchange = flips
attempt(into=zeros())
circle.Circle.exchange = exchange

# they don't want the same
attempt(step=8 if rank == 1 else 7)
attempt(into={"none": torch.zeros(1)} if rank == 3 else zeros())

# after all that it works
attempt()

# one is slow, longer than anybody's patience, but says so
circle._BEAT_S = 0.3
circle.Circle.__init__.__defaults__ = (None, 2.0)
def slow(self, number, batch):
    time.sleep(5 if number == 0 else 0)
    original(self, number, batch)
if rank == 3:
    passing._Rounds._read = slow
attempt(into=zeros())
passing._Rounds._read = original

# one is silent
def sleeps(self, out, into):
    time.sleep(60)
if rank == 1:
    print("silent", flush=True)
    circle.Circle.exchange = sleeps
    os.kill(os.getpid(), signal.SIGSTOP)
    circle.Circle.exchange = exchange
else:
    attempt(group=own, into=zeros())

# one dies
circle.Circle.__init__.__defaults__ = (None, 60.0)
def dies(self, number, batch):
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    original(self, number, batch)
if rank == 3:
    passing._Rounds._read = dies
attempt(into=zeros())
os._exit(0)
"""


def test_ranks_share_a_load(client: Client, home: str, address: str, tmp_path: Path) -> None:
    """C15 for many ranks: bytes that were read are counted, over all of them."""
    state: dict[str, Any] = {f"w{n}": torch.full((1024, 1024), float(ord(str(n)))) for n in range(6)}
    state["deep"] = torch.full((3 << 20,), ord("p"), dtype=torch.uint8)
    state["odd"] = torch.full((777,), float(ord("d")))
    path = f"{home}/run"
    with checkpoint.Manager(client, path, host_bytes=64 << 20) as manager:
        manifest = manager.save(7, {**state, "n": 5}, block=True).wait().manifest
        total = manifest.nbytes
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(WORLD), address, path, str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
            text=True,
        )
        for rank in range(WORLD)
    ]

    def said(only: Sequence[int] = range(WORLD)) -> list[dict[str, Any]]:
        found = []
        for rank in only:
            pipe = ranks[rank].stdout
            assert pipe is not None
            line = pipe.readline()
            assert line, f"rank {rank} has ended"
            found.append(json.loads(line))
        return found

    try:
        rows = said()
        assert all(row.get("right") and row["n"] == 5 for row in rows), rows
        assert sum(row["read"] for row in rows) == total
        assert max(row["read"] for row in rows) <= total / WORLD + (4 << 20)

        rows = said()
        assert all(row["right"] for row in rows), rows
        assert sum(row["read"] for row in rows) == total

        rows = said()
        assert [row["error"] for row in rows] == ["RankFailed", "RankFailed", "OSError", "RankFailed"]
        assert all("rank 2 failed: OSError: the disk is on fire" in rows[rank]["text"] for rank in (0, 1, 3))
        assert sum(row["read"] for row in rows) < total

        rows = said()
        assert rows[1]["error"] == "ChecksumMismatch"
        assert "rank 3 has handed on" in rows[1]["text"]
        assert all("rank 1 failed: ChecksumMismatch" in rows[rank]["text"] for rank in (0, 2, 3))

        rows = said()
        assert "step 8 here, 7 on rank 0" in rows[1]["text"]
        assert all(rows[rank]["error"] == "RankFailed" for rank in (0, 2, 3))
        rows = said()
        assert "lacks 'none'" in rows[3]["text"]
        assert all("rank 3 failed: InvalidArgument" in rows[rank]["text"] for rank in range(3))

        rows = said()
        assert all(row.get("right") for row in rows), rows
        assert sum(row["read"] for row in rows) == total

        assert all(row.get("right") for row in said())

        silent = ranks[1].stdout
        assert silent is not None
        assert silent.readline() == "silent\n"
        rows = said([0, 2, 3])
        assert all(row["error"] == "RankFailed" and "rank 1 was silent" in row["text"] for row in rows), rows
        ranks[1].send_signal(signal.SIGCONT)

        rows = said([0, 1, 2])
        assert all(row["error"] == "RankFailed" and "rank 3" in row["text"] for row in rows), rows
        assert all("is gone" in row["text"] for row in rows), rows
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_sharing_needs_a_group(client: Client, home: str) -> None:
    checkpoint.save(client, f"{home}/one", {"w": np.zeros(3)})
    with pytest.raises(errors.InvalidArgument, match=r"torch\.distributed"):
        checkpoint.load(client, f"{home}/one", share=True)
