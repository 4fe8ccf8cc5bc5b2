"""The size of requests: large ones, in file order (FAULTS C16)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ffs.client.file import File

MAX_PIECE_BYTES = 4 << 20


def piece_bytes(file: File) -> int:
    """The size of pieces for this file: whole chunks for writing, at most 4 MiB of one for reading."""
    chunk: int = file.placement.layout.chunk_size
    return chunk if file.writable() else min(chunk, MAX_PIECE_BYTES)
