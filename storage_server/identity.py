"""The node's directory: who it is, and that it runs once. docs/operations.md, A node's directory.

DIR/node.json   {"uuid": hex, "cluster": hex}, written once, whole or not at all
DIR/lock        locked by the running process
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from typing import Final

from ffs.errors import Busy, Damaged, WrongCluster

SOCKET_PATH_MAX: Final = 107  # sun_path, without its end
SOCKET_NAME_MAX: Final = 24  # what the native server puts below the directory


@dataclass(slots=True)
class NodeIdentity:
    """Holds the lock until `release`."""

    directory: str
    uuid: bytes
    lock_fd: int

    def release(self) -> None:
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1


def open_identity(directory: str, cluster: bytes) -> NodeIdentity:
    """Locks the directory and reads who the node is; draws it in a new one. Blocking, short.

    Busy if another process runs on it, WrongCluster if it was made for another cluster, Damaged."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    lock_fd = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy("a storage process already runs on this directory", directory) from None
        uuid = _read(directory, cluster) or _draw(directory, cluster)
    except BaseException:
        os.close(lock_fd)
        raise
    return NodeIdentity(directory, uuid, lock_fd)


def _read(directory: str, cluster: bytes) -> bytes | None:
    path = os.path.join(directory, "node.json")
    try:
        with open(path, encoding="utf-8") as file:
            known = json.load(file)
        uuid, owner = bytes.fromhex(known["uuid"]), bytes.fromhex(known["cluster"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"not the identity of a node: {error}", path) from None
    if owner != cluster:
        raise WrongCluster(
            f"this node belongs to cluster {owner.hex()}, the metadata service is cluster {cluster.hex()}: "
            "check --metadata, or give another --dir",
            path,
        )
    return uuid


def _draw(directory: str, cluster: bytes) -> bytes:
    uuid = os.urandom(16)
    path = os.path.join(directory, "node.json")
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        json.dump({"uuid": uuid.hex(), "cluster": cluster.hex()}, file)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return uuid


def socket_directory(wanted: str, identity: NodeIdentity) -> str:
    """Where the Unix sockets go: as wanted, else below the node's directory, else - its path may be too
    long for a socket's - a private one below the runtime directory. Made if absent."""
    path = wanted or os.path.join(os.path.abspath(identity.directory), "sockets")
    if not wanted and len(os.fsencode(path)) + 1 + SOCKET_NAME_MAX > SOCKET_PATH_MAX:
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        path = os.path.join(base, f"ffs-{hashlib.sha256(identity.uuid).hexdigest()[:16]}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    if os.stat(path).st_uid != os.geteuid():
        raise Busy("the directory for sockets belongs to another user: give --socket-dir", path)
    return path
