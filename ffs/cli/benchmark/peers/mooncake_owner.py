"""Owns the memory of a Mooncake store, in a process of its own. Runs in the peers' environment, without ffs:
`mooncake_owner.py HOST:MASTER-PORT SEGMENT-BYTES`; says "ready", and ends when its stdin does."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    master, segment_bytes = sys.argv[1], int(sys.argv[2])
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 64 << 20, "tcp", "", master)
    if code:
        raise SystemExit(f"Mooncake's owner couldn't be set up: {code}")
    print("ready", file=sys.__stdout__, flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main()
