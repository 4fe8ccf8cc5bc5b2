"""Where a file of a command lies: in ffs or on this machine. Pure (docs/guides/getting_started.md,
Names).

`ffs:/path` is a path in the cluster of --cluster or FFS_CLUSTER; `ffs://host:port[,host:port]/path`
names the cluster too. In cp, put and get everything else is local. Commands that only know the cluster
(ls, cat, rm and so on) take a bare absolute path as one of the cluster.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from ffs.errors import InvalidArgument

SCHEME = "ffs:"
HERE = "."
"""What listings take when no path is named: the shell's directory, else the root."""

current: str | None = None
"""The directory in the cluster that relative paths begin at: of `ffs shell`; None anywhere else."""


@dataclass(frozen=True, slots=True)
class Location:
    """A path, and whether it is in ffs. `address` is "" where the location doesn't name a cluster."""

    path: str
    remote: bool
    address: str = ""

    @property
    def name(self) -> str:
        """The last component; "" for a root."""
        return posixpath.basename(self.path.rstrip("/"))

    def child(self, name: str) -> Location:
        return Location(posixpath.join(self.path, name), self.remote, self.address)

    def __str__(self) -> str:
        if not self.remote:
            return self.path
        return f"ffs://{self.address}{self.path}" if self.address else f"ffs:{self.path}"


def parse_location(text: str) -> Location:
    """For cp, put, get: `ffs:` names the cluster, the rest is local. InvalidArgument says what is wrong."""
    if not text:
        raise InvalidArgument("an empty path: name a file, or ffs:/ for the root of the cluster")
    if not text.startswith(SCHEME):
        return Location(text, remote=False)
    rest = text[len(SCHEME) :]
    address = ""
    if rest.startswith("//"):
        address, slash, path = rest[2:].partition("/")
        rest = slash + path or "/"
        if not address:
            raise InvalidArgument(f"{text}: no host after ffs://: write ffs://host:port/path, or ffs:/path")
    if current is not None and not rest.startswith("/"):
        rest = _below(current, rest)
    if not rest.startswith("/"):
        raise InvalidArgument(f"{text}: paths in ffs are absolute: write ffs:/{rest}")
    return Location(rest, remote=True, address=address)


def parse_remote(text: str) -> Location:
    """For commands that only know the cluster: `ffs:/path` or a bare `/path`."""
    if text.startswith(SCHEME):
        return parse_location(text)
    if text == HERE and current is None:
        return Location("/", remote=True)
    if text and current is not None:
        text = _below(current, text)
    if not text.startswith("/"):
        raise InvalidArgument(
            f"{text or 'an empty path'}: paths in ffs are absolute: write /{text} or ffs:/{text}"
        )
    return Location(text, remote=True)


def _below(directory: str, text: str) -> str:
    """A path that may be relative; '.' goes, '..' is left to the cluster, which knows of symlinks."""
    if text.startswith("/"):
        return text
    parts = [part for part in text.split("/") if part != "."]
    return posixpath.join(directory, "/".join(parts)) if any(parts) else directory


def one_address(locations: list[Location], default: str | None) -> str | None:
    """The cluster that the locations name, else `default` (None: FFS_CLUSTER). InvalidArgument if they
    name several."""
    named = sorted({place.address for place in locations if place.address})
    if len(named) > 1:
        raise InvalidArgument(
            f"{' and '.join(named)} are two clusters: copy by way of a local file, one command each"
        )
    if named and default and named[0] != default:
        raise InvalidArgument(f"--cluster {default} contradicts ffs://{named[0]}/...: give one of them")
    return named[0] if named else default
