"""`UPath("ffs:///data/x")`: pathlib's interface to the store, by package universal_pathlib.

docs/guides/fsspec.md.
"""

from __future__ import annotations

from typing import Any

from upath.core import UPath

__all__ = ["FfsPath"]


class FfsPath(UPath):
    """A path of the store; `storage_options` are those of ffs.fsspec.FfsFileSystem."""

    __slots__ = ()

    @property
    def path(self) -> str:
        """The path in the cluster."""
        text: str = super().path
        return text.rstrip("/") or "/"

    def __str__(self) -> str:
        address = self.storage_options.get("address")
        return f"ffs://{address}{self.path}" if address else str(super().__str__())

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """As pathlib.Path.mkdir."""
        client = self.fs.client
        if parents and not exist_ok:
            client.makedirs(self.parent.path, exist_ok=True)
        try:
            if parents and exist_ok:
                client.makedirs(self.path, mode, exist_ok=True)
            else:
                client.mkdir(self.path, mode)
        except FileExistsError:
            if not exist_ok or not client.isdir(self.path):
                raise

    def chmod(self, mode: int, *, follow_symlinks: bool = True) -> None:
        """As pathlib.Path.chmod."""
        self.fs.client.chmod(self.path, mode, follow_symlinks=follow_symlinks)

    def symlink_to(self, target: Any, target_is_directory: bool = False) -> None:
        """As pathlib.Path.symlink_to."""
        self.fs.client.symlink(target.path if isinstance(target, UPath) else target, self.path)

    def readlink(self) -> FfsPath:
        """As pathlib.Path.readlink; a relative target is taken from the link's directory."""
        return self.parent.joinpath(self.fs.client.readlink(self.path))
