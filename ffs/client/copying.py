"""`copy_many`, `IovSlice`: what other packages of the client's side use of memory. docs/client.md."""

from ffs._native.copying import copy_many
from ffs._native.iov import IovSlice

__all__ = ["IovSlice", "copy_many"]
