"""What other programs ask of the supervisor that runs a development cluster: add, kill, stop, start a node.

One request a connection over a Unix socket in the cluster's directory: a line `{"do", "node"}`, answered by
`{"node"}` or by the error. The supervisor answers one after another, between its other duties; whoever may
write in the directory may ask.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from ffs.cli.devcluster.state import Directory
from ffs.errors import NotFound, ProtocolError, error_of, from_os_error

TIMEOUT_S: Final = 120.0
_LINE: Final = 4096

Verb = str
VERBS: Final = ("add", "kill", "stop", "start", "fresh")


class Request(msgspec.Struct, frozen=True):
    do: Verb
    node: str = ""


class Reply(msgspec.Struct, frozen=True):
    node: str = ""
    error: str = ""
    errno: int = 0
    name: str | None = None


@contextlib.contextmanager
def _in_directory(directory: Directory) -> Iterator[str]:
    """The socket's address by way of an open directory: a path of any length fits."""
    descriptor = os.open(directory.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{directory.control.name}"
    finally:
        os.close(descriptor)


class Control:
    """The supervisor's end. Not thread-safe."""

    def __init__(self, directory: Directory) -> None:
        """Needs the directory's lock (state.Directory.hold): what is left of an earlier one goes."""
        self._directory = directory
        directory.control.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _in_directory(directory) as address:
            self._socket.bind(address)
        self._socket.listen(8)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def serve(self, do: Callable[[Verb, str], str]) -> None:
        """Answers who waits; returns at once if nobody does. `do` gives a node's name, or raises."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            with connection, contextlib.suppress(OSError, msgspec.MsgspecError):  # an asker that went away
                connection.settimeout(2.0)
                request = msgspec.json.decode(_read_line(connection), type=Request)
                connection.sendall(msgspec.json.encode(_answer(request, do)) + b"\n")

    def close(self) -> None:
        self._socket.close()
        self._directory.control.unlink(missing_ok=True)


def _answer(request: Request, do: Callable[[Verb, str], str]) -> Reply:
    try:
        return Reply(node=do(request.do, request.node))
    except OSError as error:
        known = from_os_error(error)
        name = os.fsdecode(known.filename) if isinstance(known.filename, str | bytes) else None
        return Reply(error=known.message, errno=known.errno or errno.EIO, name=name)


def ask(directory: Directory, do: Verb, node: str = "") -> str:
    """The name of the node. Raises the supervisor's error; NotFound when none runs. Blocking."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            with _in_directory(directory) as address:
                connection.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            raise NotFound("no cluster runs here: start it with ffs up", str(directory.path)) from None
        connection.sendall(msgspec.json.encode(Request(do, node)) + b"\n")
        reply = msgspec.json.decode(_read_line(connection), type=Reply)
    if reply.errno:
        raise error_of(reply.errno, reply.error, reply.name)
    return reply.node


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(_LINE)
        if not part or len(line) > _LINE:
            raise ProtocolError("the supervisor's connection ended before its answer")
        line += part
    return line
