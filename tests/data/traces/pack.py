"""Packs request traces of /path/*.jsonl into the compact form beside it: `pack.py FILE.jsonl FILE.trace`.

README.md beside this file says what the bytes are and where the traces come from.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def zigzag(number: int) -> bytes:
    return varint(number * 2 if number >= 0 else -number * 2 - 1)


def runs(ids: list[int]) -> list[tuple[int, int]]:
    """Consecutive ids as (first, count)."""
    found: list[tuple[int, int]] = []
    for one in ids:
        if found and sum(found[-1]) == one:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((one, 1))
    return found


def pack(lines: list[str]) -> bytes:
    out = bytearray()
    before_ms = 0
    for line in lines:
        request = json.loads(line)
        out += zigzag(request["timestamp"] - before_ms)
        before_ms = request["timestamp"]
        parts = runs(request["hash_ids"])
        out += varint(len(parts))
        at = 0
        for first, count in parts:
            out += zigzag(first - at) + varint(count)
            at = first + count
    return bytes(out)


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(pack(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()))
