"""What other packages of the client's side use of memory: copies and hashes in one call. docs/client.md."""

from ffs._native.copying import copy_many
from ffs._native.hashing import XXH3_BYTES, xxh3_many
from ffs._native.iov import IovSlice

__all__ = ["XXH3_BYTES", "IovSlice", "copy_many", "xxh3_many"]
