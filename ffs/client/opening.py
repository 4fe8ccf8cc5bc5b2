"""`ffs.open`: from a path and a mode to a file object. docs/client.md, Opening."""

from __future__ import annotations

import io
from typing import Any

from ffs import errors
from ffs.client import file as files
from ffs.client.client import Client, default_client
from ffs.client.file import File
from ffs.client.handle import OpenFile
from ffs.client.layers import FileRandom, FileReader, FileText, FileWriter
from ffs.client.mode import Mode, check_arguments, parse_mode
from ffs.client.paths import PathLike, check_path, encode_path, split
from ffs.proto import meta, records


def open_path(
    path: PathLike,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    *,
    client: Client | None = None,
    permissions: int = 0o666,
    table: str | int | None = None,
    chunk_size: int | None = None,
    stripe: int | None = None,
    atomic: bool = False,
) -> Any:
    """As the builtin open, for a file of the store.

    path: absolute. mode, buffering, encoding, errors, newline: as of the builtin; contradictions are
    ValueErrors. client: None for the one of FFS_CLUSTER. For files that this call creates:
    permissions (the umask is applied), table (chain table by name or id), chunk_size (bytes, a power
    of two of 4 KiB to 16 MiB), stripe (chains, 0 for all); what isn't given comes from the directory.

    atomic=True (modes w and x): the file is invisible until close, which gives it its name and
    content in one step; an exception inside `with` leaves what was there before.

    Returns an io.TextIOWrapper, or io.BufferedReader, BufferedWriter, BufferedRandom (binary), or
    the raw `File` (buffering=0). Blocking. Raises NotFound, Exists, IsADirectory, AccessDenied...
    """
    return open_file(
        client if client is not None else default_client(),
        path,
        mode,
        buffering,
        encoding,
        errors,
        newline,
        permissions=permissions,
        table=table,
        chunk_size=chunk_size,
        stripe=stripe,
        atomic=atomic,
    )


def open_file(
    client: Client,
    path: PathLike,
    mode: str,
    buffering: int = -1,
    encoding: str | None = None,
    errors_: str | None = None,
    newline: str | None = None,
    *,
    permissions: int = 0o666,
    table: str | int | None = None,
    chunk_size: int | None = None,
    stripe: int | None = None,
    atomic: bool = False,
    ino: int = 0,
    ticket: bytes = b"",
) -> Any:
    """`open_path` under a given client; `ino` != 0 names the inode itself, with what opening it gave."""
    parsed = parse_mode(mode)
    layout_given = not (table is None and chunk_size is None and stripe is None)
    check_arguments(parsed, buffering, encoding, errors_, newline, atomic=atomic, layout=layout_given)
    text = check_path(path)
    layout = client._layout_choice(table, chunk_size, stripe) if layout_given else None
    if atomic:
        raw = _open_unnamed(client, text, parsed, permissions, layout)
    else:
        raw = _open_named(client, text, parsed, permissions, layout, ino, ticket)
    try:
        top = _wrap(raw, parsed, mode, buffering, encoding, errors_, newline)
    except BaseException:
        raw.discard()
        raise
    client._opened(top)
    return top


def _open_named(
    client: Client,
    path: str,
    mode: Mode,
    permissions: int,
    layout: meta.LayoutChoice | None,
    ino: int,
    ticket: bytes,
) -> File:
    handle = OpenFile(client.core_of_process, path, flags_of(mode))
    request = meta.Open(
        path=b"" if ino else encode_path(path),
        ino=ino,
        flags=handle.flags,
        mode=permissions & 0o7777 & ~client.core.umask,
        layout=layout,
        ticket=ticket,
    )
    opened = handle.open(request)
    try:
        check_type(opened.attributes.type, path)
    except OSError:
        handle.close()
        raise
    return File(client, handle, mode.raw)


def _open_unnamed(
    client: Client, path: str, mode: Mode, permissions: int, layout: meta.LayoutChoice | None
) -> File:
    parent, name = split(path)
    if not name or path.endswith("/"):
        raise errors.IsADirectory("an atomic file needs a name", path)
    bits = permissions & 0o7777 & ~client.core.umask
    try:
        there = client.attributes(path, follow_symlinks=False)
    except FileNotFoundError:
        pass
    else:
        if mode.exclusive:
            raise errors.Exists("mode x: something is there already", path)
        check_type(there.type, path, links=True)
        if there.type == records.FILE:
            bits = there.mode  # as the builtin open keeps the mode of a file that it overwrites
    flags = meta.OPEN_TMPFILE | meta.OPEN_WRITE | (meta.OPEN_READ if mode.updating else 0)
    handle = OpenFile(client.core_of_process, path, flags)
    handle.open(meta.Open(path=encode_path(parent), flags=flags, mode=bits, layout=layout))
    return File(client, handle, mode.raw, publish_as=path, replace=not mode.exclusive)


def flags_of(mode: Mode) -> int:
    """The open flags of the protocol for a mode."""
    flags = meta.OPEN_READ if mode.reading else 0
    flags |= meta.OPEN_WRITE if mode.writing else 0
    flags |= meta.OPEN_CREATE if mode.creating else 0
    flags |= meta.OPEN_EXCL if mode.exclusive else 0
    flags |= meta.OPEN_TRUNC if mode.truncating else 0
    flags |= meta.OPEN_APPEND if mode.appending else 0
    return flags


def check_type(kind: int, path: str, *, links: bool = False) -> None:
    """Refuse what isn't a file. IsADirectory, InvalidArgument."""
    if kind == records.DIRECTORY:
        raise errors.IsADirectory("it is a directory; listdir and scandir read it", path)
    if kind == records.KV_SPACE:
        raise errors.InvalidArgument("it is a KV space; ffs.kv.Space opens it", path)
    if kind != records.FILE and not (links and kind == records.SYMLINK):
        raise errors.InvalidArgument(f"it isn't a file (type {kind})", path)


def _wrap(
    raw: File,
    parsed: Mode,
    mode: str,
    buffering: int,
    encoding: str | None,
    errors_: str | None,
    newline: str | None,
) -> Any:
    if buffering == 0:
        return raw
    line_buffering = buffering == 1 and parsed.text
    size = buffering if buffering > 1 else _buffer_bytes(raw, parsed)
    buffered: FileReader | FileWriter | FileRandom
    if parsed.updating:
        buffered = FileRandom(raw, size)
    elif parsed.reading:
        buffered = FileReader(raw, size)
    else:
        buffered = FileWriter(raw, size)
    if not parsed.text:
        return buffered
    top = FileText(buffered, io.text_encoding(encoding), errors_, newline, line_buffering)
    buffered.layered = True
    top.newline = newline
    top.mode = mode  # type: ignore[misc]
    return top


def _buffer_bytes(raw: File, mode: Mode) -> int:
    if not mode.writing or mode.updating:
        return files.READ_BUFFER_BYTES
    if not mode.appending:
        return files.GATHER_BUFFER_BYTES
    layout = raw._open_file.layout
    return max(files.WRITE_BUFFER_BYTES, layout.chunk_size if layout is not None else 0)
