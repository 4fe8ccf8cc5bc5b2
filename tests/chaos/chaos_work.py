"""The load: processes whose threads each do one operation at a time on shared registers, and write down
what they asked and were told.

Registers are chunks of files (two slots, a write covers one or both) and blocks of a KV space (put
once, got by anybody). Started as `python chaos_work.py CONFIG.json`; ends when its input closes, then
writes its history. Times are time.monotonic_ns(), one clock for all processes of a machine.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "linearizability"))

from lin_history import Operation, save

import ffs
from ffs import errors
from ffs.client.file import File
from ffs.kv import Identity, Space, Status, root_hash

SLOT = 4096
SLOTS = 2
CHUNK = 64 << 10
BLOCK = 4096

# What may happen while servers die: each says that the outcome isn't known, or that nothing serves now.
DOCUMENTED = (errors.DeadlineExceeded, errors.OutcomeUnknown, errors.ChainUnavailable, errors.Unreachable)


class Config(msgspec.Struct):
    address: str
    secret_file: str
    worker: int
    threads: int
    seed: int
    files: list[str]
    registers: int  # a file
    space: str
    blocks: int  # that all workers fight for
    timeout_s: float
    history: str


@dataclass(slots=True)
class Shared:
    operations: list[Operation]
    wrong: list[str]  # what must never happen
    errors: Counter[str]
    stop: threading.Event


def fill(value: int) -> bytes:
    return value.to_bytes(8, "little") * (SLOT // 8)


def value_of(slot: bytes) -> int | None:
    """None for zeros; raises ValueError for anything that isn't one write's bytes."""
    value = int.from_bytes(slot[:8], "little")
    if slot != fill(value):
        raise ValueError(f"torn slot: {sorted({slot[at : at + 8].hex() for at in range(0, SLOT, 8)})[:4]}")
    return value or None


class Worker:
    """One thread."""

    def __init__(self, config: Config, thread: int, shared: Shared, client: ffs.Client) -> None:
        self._config = config
        self._shared = shared
        self._name = f"w{config.worker}.{thread}"
        self._rng = random.Random(f"{config.seed}/{self._name}")
        self._number = 0
        self._identity = config.worker * 256 + thread + 1
        self._files: list[File] = [client.open(path, "r+b", 0) for path in config.files]  # type: ignore[misc]
        self._space = Space.open(client, config.space)

    def _new_value(self) -> int:
        self._number += 1
        return self._identity << 40 | self._number

    def run(self) -> None:
        try:
            while not self._shared.stop.is_set():
                if self._rng.random() < 0.75:
                    self._one_register()
                else:
                    self._one_block()
        except BaseException as error:
            self._shared.wrong.append(f"{self._name}: {type(error).__name__}: {error}")

    def _one_register(self) -> None:
        at = self._rng.randrange(len(self._files))
        chunk = self._rng.randrange(self._config.registers)
        key = f"{self._config.files[at]}#{chunk}"
        file = self._files[at]
        base = chunk * CHUNK
        if self._rng.random() < 0.5:
            self._do(key, "read", (0, 1), lambda: self._read(file, base))
            return
        value = self._new_value()
        slots = self._rng.choice([(0,), (1,), (0, 1)])
        argument = tuple((slot, value) for slot in slots)
        data = fill(value) * len(slots)

        def write() -> str:
            assert file.pwrite(data, base + slots[0] * SLOT) == len(data)
            return "ok"

        self._do(key, "write", argument, write)

    def _read(self, file: File, base: int) -> tuple[int | None, ...]:
        data = file.pread(SLOT * SLOTS, base)
        return tuple(value_of(data[at : at + SLOT]) for at in range(0, SLOT * SLOTS, SLOT))

    def _one_block(self) -> None:
        number = self._rng.randrange(self._config.blocks)
        key = [root_hash(Identity(model=f"block {number}"))]
        timeout_s = self._config.timeout_s
        if self._rng.random() < 0.5:

            def get() -> Any:
                into = np.zeros(BLOCK, np.uint8)
                result = self._space.get(key, [into], timeout_s=timeout_s)
                result.raise_errors()
                if result[0] is Status.MISS:
                    return "absent"
                value = value_of(into.tobytes())
                return (value,) * SLOTS

            self._do(f"block {number}", "get", (), get)
            return
        value = self._new_value()

        def put() -> str:
            result = self._space.put(key, [fill(value)], timeout_s=timeout_s)
            result.raise_errors()
            return "existed" if result[0] is Status.HIT else "created"

        self._do(f"block {number}", "create", value, put)

    def _do(self, key: str, kind: str, argument: Any, work: Any) -> None:
        called = time.monotonic_ns()
        answer: Any = None
        returned: int | None = None
        try:
            answer = work()
            returned = time.monotonic_ns()
        except DOCUMENTED as error:
            self._shared.errors[type(error).__name__] += 1
        except ValueError as error:
            self._shared.wrong.append(f"{self._name}: {key}: {error}")
            return
        if returned is None and kind in ("read", "get"):
            return
        self._shared.operations.append(Operation(key, self._name, kind, argument, answer, called, returned))


def main() -> int:
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Config)
    shared = Shared([], [], Counter(), threading.Event())
    with ffs.connect(config.address, secret=config.secret_file, request_timeout=config.timeout_s) as client:
        workers = [Worker(config, at, shared, client) for at in range(config.threads)]
        threads = [threading.Thread(target=worker.run) for worker in workers]
        for thread in threads:
            thread.start()
        print("started", flush=True)
        sys.stdin.read()
        shared.stop.set()
        for thread in threads:
            thread.join()
    save(Path(config.history), shared.operations)
    print(json.dumps({"wrong": shared.wrong, "errors": shared.errors, "operations": len(shared.operations)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
