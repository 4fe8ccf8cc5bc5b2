"""One rank of `ffs bench ckpt`: `python -m ffs.cli.benchmark.ckpt_worker RANK COUNT RENDEZVOUS MODEL BYTES
SHAPE`, SHAPE being "weights" or "training".

It does what it is told by lines of JSON on stdin, each at the same time as all other ranks, and answers each
by one on stdout: what it measured, in seconds and bytes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh

import ffs
from ffs.checkpoint import Manager
from ffs.cli.benchmark import ckpt_state
from ffs.cli.benchmark.ckpt_training import Training

Answer = dict[str, Any]


class Worker:
    """All methods but `serve` are what it can be told; they block."""

    def __init__(self, rank: int, count: int, model: Path, size_bytes: int, shape: str) -> None:
        mesh = init_device_mesh("cpu", (count,))
        make = ckpt_state.weights if shape == "weights" else ckpt_state.training_state
        self.rank = rank
        self.state = make(model, size_bytes, rank, mesh)
        self.client: ffs.Client | None = None
        self.manager: Manager | None = None
        self.step = 0
        self.training: Training | None = None
        self.beside = dist.new_group(backend="gloo")
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    # --- the cluster ------------------------------------------------------------------------

    def open(self, address: str, path: str, keep: int) -> Answer:
        """A client and a Manager on a cluster; those that were open are closed."""
        self.close()
        self.client = ffs.connect(address, transport="auto")
        room = self.state.local_bytes + (64 << 20)
        self.manager = Manager(self.client, path, host_bytes=room, keep=keep)
        return {"local": self.state.local_bytes, "whole": self.state.whole_bytes}

    def close(self) -> Answer:
        if self.manager is not None:
            self.manager.close()
        if self.client is not None:
            self.client.close()
        self.manager = self.client = None
        return {}

    def _open(self) -> Manager:
        assert self.manager is not None, "told to save before a cluster was opened"
        return self.manager

    def collect(self) -> Answer:
        """Garbage, between what is measured: a pass takes as long as a load, and would strike anywhere."""
        gc.collect()
        return {}

    # --- saving -----------------------------------------------------------------------------

    def change(self, which: str = "all") -> Answer:
        """Other content for all tensors, or a tenth of them; bytes that are others now."""
        names = list(self.state.local)
        if which == "last":
            sizes = [self.state.tensors[name].nbytes for name in names]
            total, kept = sum(sizes), 0
            chosen = []
            for name, size in zip(names, sizes, strict=True):
                kept += size
                if kept > 0.9 * total:
                    chosen.append(name)
            names = chosen
        elif which == "scattered":
            left = sum(self.state.tensors[name].nbytes for name in names) // 10
            chosen = []
            for name in random.Random(10).sample(names, len(names)):
                if self.state.tensors[name].nbytes <= left:
                    left -= self.state.tensors[name].nbytes
                    chosen.append(name)
            names = chosen
        ckpt_state.change([self.state.local[name] for name in names])
        return {"changed": sum(self.state.local[name].nbytes for name in names)}

    def copy(self) -> Answer:
        """A plain copy into memory that was touched before."""
        if not self._copies:
            self._copies = [(torch.zeros_like(piece), piece) for piece in self.state.local.values()]
        with _together() as took:
            for target, source in self._copies:
                target.copy_(source)
        return {"seconds": took()}

    def no_copy(self) -> Answer:
        """Its memory is free again."""
        self._copies = []
        return {}

    def save(self) -> Answer:
        """`stall`: until save returned; `seconds`: until the checkpoint was visible."""
        manager = self._open()
        self.step += 1
        with _together() as took:
            handle = manager.save(self.step, self.state.tensors)
            stall = took()
            report = handle.wait()
        return {"stall": stall, "seconds": took(), "written": report.bytes_written}

    def load(self) -> Answer:
        manager = self._open()
        with _together() as took:
            manager.load(into=self.state.tensors)
        return {"seconds": took()}

    # --- peers ------------------------------------------------------------------------------

    def torch_save(self, directory: str) -> Answer:
        path = Path(directory) / f"rank{self.rank}.pt"
        with _together() as took, path.open("wb") as file:
            torch.save(self.state.local, file)
            file.flush()
            os.fsync(file.fileno())
        seconds = took()
        path.unlink()
        return {"seconds": seconds}

    def dcp_save(self, directory: str) -> Answer:
        with _together() as took:
            state_dict_saver.save(self.state.tensors, checkpoint_id=directory)
        seconds = took()
        for path in Path(directory).glob(f"__{self.rank}_*"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return {"seconds": seconds}

    def dcp_load(self, directory: str) -> Answer:
        with _together() as took:
            state_dict_loader.load(self.state.tensors, checkpoint_id=directory)
        seconds = took()
        if self.rank == 0:
            shutil.rmtree(directory)
        return {"seconds": seconds}

    # --- beside training --------------------------------------------------------------------

    def train(self, steps: int) -> Answer:
        """The mean time of a step."""
        if self.training is None:
            self.training = Training(list(self.state.local.values()), self._open())
        times = [self.training.step() for _ in range(steps)]
        return {"seconds": statistics.mean(times)}

    def no_training(self) -> Answer:
        """Its memory is free again."""
        if self.training is not None:
            self.training.close()
        self.training = None
        return {}

    def train_save(self) -> Answer:
        """A save under guard, steps until it is visible. `stall`: what save and the update waited; `with`:
        the mean time of a step meanwhile, without that; `without`: before."""
        training, manager = self._training(), self._open()
        before = [training.step() for _ in range(4)]
        self.step += 1
        begun = time.perf_counter()
        handle = manager.save(self.step, self.state.tensors)
        stall = time.perf_counter() - begun
        first = training.step()
        waited = training.waited
        meanwhile = [first - waited]
        going = torch.ones(1)
        while True:
            going.fill_(0 if handle.replicated.done() else 1)
            dist.all_reduce(going)
            if not going.item():
                break
            meanwhile.append(training.step())
        report = handle.wait()
        return {
            "stall": stall + waited,
            "called": stall,
            "without": statistics.mean(before),
            "with": statistics.mean(meanwhile),
            "steps": len(meanwhile),
            "persist": report.seconds,
            "limit": (report.limit or 0.0) / 1e6,
        }

    def train_dcp_async(self, directory: str) -> Answer:
        """The same with torch's own: `stall` is what async_save takes before it returns."""
        training = self._training()
        before = [training.step() for _ in range(4)]
        begun = time.perf_counter()
        # In a thread of its own it does collectives: beside those of training they need their own group.
        going = state_dict_saver.async_save(
            self.state.tensors, checkpoint_id=directory, process_group=self.beside
        )
        stall = time.perf_counter() - begun
        after = training.step()
        assert isinstance(going, Future)
        going.result()
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(directory)
        return {"stall": stall, "without": statistics.mean(before), "with": after}

    def _training(self) -> Training:
        assert self.training is not None, "told to save beside training before there was any"
        return self.training

    # --- the loop ---------------------------------------------------------------------------

    def serve(self) -> None:
        _say({"ready": self.rank})
        for line in sys.stdin:
            told = json.loads(line)
            do: Callable[..., Answer] = getattr(self, told.pop("do"))
            dist.barrier()
            _say(do(**told))
        self.no_training()
        self.close()


@contextlib.contextmanager
def _together() -> Any:
    """The time since all ranks got here."""
    dist.barrier()
    begun = time.perf_counter()
    yield lambda: time.perf_counter() - begun


def _say(answer: Answer) -> None:
    print(json.dumps(answer), flush=True)


def main() -> int:
    rank, count, rendezvous, model, size_bytes, shape = sys.argv[1:]
    torch.set_num_threads(1)  # as torchrun has it where many ranks share a machine
    gc.disable()  # and `collect`, as jobs of many ranks do it
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(count)
        )
        Worker(int(rank), int(count), Path(model), int(size_bytes), shape).serve()
    except Exception as error:
        traceback.print_exc()
        _say({"error": f"rank {rank}: {error}"})
        return 1
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
