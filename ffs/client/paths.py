"""Paths of the store: absolute, '/' between names, names of at most 255 bytes. Pure.

A path is a str here and bytes on the wire, UTF-8 with surrogateescape as in `os.fsencode`.
docs/client.md, Paths.
"""

from __future__ import annotations

import os

from ffs import errors

NAME_MAX_BYTES = 255
PATH_MAX_BYTES = 4096

PathLike = str | os.PathLike[str]


def check_path(path: PathLike) -> str:
    """`path` as a str, checked.

    Raises TypeError for what isn't a path, InvalidArgument (a ValueError) for a relative path or a
    NUL, NotFound for the empty path, NameTooLong, each with the name that is wrong. '.' and '..'
    go to the service, which resolves them after symbolic links.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(
            f"a path of the store is a str or os.PathLike[str], not {type(text).__name__}: {text!r}"
        )
    encode_path(text)
    return text


def encode_path(text: str) -> bytes:
    """A str path, checked as in `check_path`, as the bytes of the wire."""
    if not text:
        raise errors.NotFound("the path is empty; paths of the store begin with '/'", text)
    if text[0] != "/":
        raise errors.InvalidArgument("the path isn't absolute; paths of the store begin with '/'", text)
    if "\0" in text:
        raise errors.InvalidArgument("the path has a NUL in it; a name can't", text)
    wire = encode_text(text)
    if len(wire) > NAME_MAX_BYTES:
        _check_lengths(text, wire)
    return wire


def encode_text(text: str) -> bytes:
    """Any str as bytes of the wire (targets of symbolic links have no rules)."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise errors.InvalidArgument(f"the path can't be written in UTF-8: {error.reason}", text) from None


def decode_text(wire: bytes) -> str:
    """The str for bytes of the wire."""
    return wire.decode("utf-8", "surrogateescape")


def wire_path(path: PathLike) -> bytes:
    """`encode_path` for anything that `check_path` takes."""
    return encode_path(path) if type(path) is str else encode_path(check_path(path))


def _check_lengths(text: str, wire: bytes) -> None:
    if len(wire) > PATH_MAX_BYTES:
        raise errors.NameTooLong(f"the path has {len(wire)} bytes, the most is {PATH_MAX_BYTES}", text)
    for name in wire.split(b"/"):
        if len(name) > NAME_MAX_BYTES:
            start = decode_text(name[:40])
            raise errors.NameTooLong(
                f"the name {start!r}... has {len(name)} bytes, the most is {NAME_MAX_BYTES}", text
            )


def join(directory: str, name: str) -> str:
    """`directory`/`name` without doubling the slash of the root."""
    return directory + name if directory.endswith("/") else f"{directory}/{name}"


def split(path: str) -> tuple[str, str]:
    """(parent, last name) of a path that `check_path` returned; the root gives ("/", "")."""
    trimmed = path.rstrip("/")
    if not trimmed:
        return "/", ""
    parent, _, name = trimmed.rpartition("/")
    return parent or "/", name
