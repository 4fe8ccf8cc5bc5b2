"""Puts and gets blocks of a Mooncake store, a call at a time, as `KvLoop` does with ffs. Runs in the peers'
environment, without ffs: `mooncake_client.py HOST:MASTER-PORT`. A request is a line of JSON on stdin, and its
answer one on stdout (process.py).

What isn't the call itself - keys, content, comparing, removing what was put - happens outside of the time
that counts. The client owns no segment, so that every block crosses to the owner's process.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import random
import sys
import time
from typing import Any

KEY_BYTES = 32


class Loop:
    """The calls of one case."""

    def __init__(self, store: Any, op: str, size: int, batch: int, set_bytes: int) -> None:
        self._store = store
        self._op = op
        self._size = size
        self._batch = batch
        self._noise = random.Random(5).randbytes(size + 65536)
        self._memory = mmap.mmap(-1, size * batch)
        self._view = memoryview(self._memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._places = [address + i * size for i in range(batch)]
        self._sizes = [size] * batch
        self._random = random.Random(f"{op} {size} {batch}")
        self._next = 0
        self._keys: list[bytes] = []
        self._check(store.register_buffer(address, size * batch), 0)
        for i in range(batch):
            self._view[i * size : (i + 1) * size] = self._noise[:size]
        if op == "get":
            self._keys = self._new_keys(max(batch, set_bytes // size) // batch * batch)
            for begin in range(0, len(self._keys), batch):
                part = self._keys[begin : begin + batch]
                for position, key in enumerate(part):
                    self._view[position * size : (position + 1) * size] = self._content(key)
                self._check_all(self._put([key.hex() for key in part]), 0)

    def _new_keys(self, count: int) -> list[bytes]:
        return [self._random.randbytes(KEY_BYTES) for _ in range(count)]

    def _content(self, key: bytes) -> bytes:
        start = int.from_bytes(key[:2], "little") % (len(self._noise) - self._size + 1)
        return key + self._noise[start + KEY_BYTES : start + self._size]

    def _put(self, names: list[str]) -> list[int]:
        if self._batch == 1:
            return [self._store.put_from(names[0], self._places[0], self._size)]
        return list(self._store.batch_put_from(names, self._places, self._sizes))

    def _get(self, names: list[str]) -> list[int]:
        if self._batch == 1:
            return [self._store.get_into(names[0], self._places[0], self._size)]
        return list(self._store.batch_get_into(names, self._places, self._sizes))

    @staticmethod
    def _check(code: int, wanted: int) -> None:
        if code != wanted:
            raise SystemExit(f"Mooncake answered {code}, not {wanted}")

    def _check_all(self, codes: list[int], wanted: int) -> None:
        for code in codes:
            self._check(code, wanted)

    def run(self, seconds: float) -> dict[str, object]:
        fresh, batch = self._op == "put", self._batch
        wanted = 0 if fresh else self._size
        call = self._put if fresh else self._get
        put: list[str] = []
        calls_ns: list[int] = []
        errors = spent = 0
        part: list[bytes] = []
        while not calls_ns or spent < seconds * 1e9:
            if fresh:
                if len(put) + batch > 4096:
                    break
                part = self._new_keys(batch)
            else:
                part = self._keys[self._next : self._next + batch]
                self._next = (self._next + batch) % len(self._keys)
            names = [key.hex() for key in part]
            begun = time.perf_counter_ns()
            codes = call(names)
            calls_ns.append(time.perf_counter_ns() - begun)
            spent += calls_ns[-1]
            errors += sum(code != wanted for code in codes)
            if fresh:
                put += names
        verified = self._verify(part)
        if put:
            self._check_all(list(self._store.batch_remove(put, True)), 0)
        return {
            "calls_ns": calls_ns,
            "blocks": len(calls_ns) * batch,
            "errors": errors,
            "verified_bytes": verified,
        }

    def _verify(self, keys: list[bytes]) -> int:
        """Every byte of the last call's blocks; how many. What was put is read back into cleared memory."""
        if self._op == "put":
            self._memory[:] = bytes(len(self._memory))
            self._check_all(self._get([key.hex() for key in keys]), self._size)
        for position, key in enumerate(keys):
            expected = self._noise[: self._size] if self._op == "put" else self._content(key)
            if self._view[position * self._size : (position + 1) * self._size] != expected:
                raise SystemExit("Mooncake delivered other bytes than were put")
        return len(keys) * self._size

    def close(self) -> None:
        self._check(self._store.unregister_buffer(self._places[0]), 0)
        self._check_all(list(self._store.batch_remove([key.hex() for key in self._keys], True)), 0)


def main() -> None:
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", sys.argv[1])
    if code:
        raise SystemExit(f"Mooncake's client couldn't be set up: {code}")
    answer: dict[str, object] = {"ready": True}
    loop: Loop | None = None
    while True:
        print(json.dumps(answer), flush=True)
        line = sys.stdin.readline()
        if not line:
            break
        request = json.loads(line)
        if request["do"] == "case":
            loop = Loop(store, request["op"], request["size"], request["batch"], request["set_bytes"])
            answer = {}
        elif request["do"] == "run" and loop is not None:
            answer = loop.run(request["seconds"])
        elif request["do"] == "end" and loop is not None:
            loop.close()
            loop, answer = None, {}
    store.close()


if __name__ == "__main__":
    main()
