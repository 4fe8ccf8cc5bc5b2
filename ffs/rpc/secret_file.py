"""Files that hold the cluster secret or a user's token, and who else may read them. docs/guides/security.md.

Servers refuse a file that others may read: it is as good as published, and nobody looks at a server's log for
a warning. Clients warn: they may have been given the file by somebody who alone can change it.
"""

from __future__ import annotations

import os
import stat
import warnings
from typing import Final

from ffs.errors import InvalidArgument, NotPermitted, Unauthenticated
from ffs.proto.auth import Token, parse_token
from ffs.rpc.handshake import MIN_SECRET_BYTES, Credential

SECRET_VARIABLE: Final = "FFS_CLUSTER_SECRET_FILE"
TOKEN_VARIABLE: Final = "FFS_TOKEN_FILE"
_MOST_BYTES: Final = 64 << 10


class ExposedSecretWarning(UserWarning):
    """A file with a secret or token can be read by others than its owner."""


def exposure(mode: int, owner: int, reader: int) -> str:
    """Who else may read, or write, a secret's file: "" for nobody. Pure.

    As ssh judges keys: of a file of our own nobody else may. Of somebody else's, say root's, the group that
    we are given it by is that one's decision, and only access for everybody counts.
    """
    if mode & 0o007:
        return "everybody"
    if mode & 0o070 and owner == reader:
        return "its group"
    return ""


def read_secret(path: str, *, refuse_exposed: bool = False) -> bytes:
    """The cluster secret in a file (surrounding white space doesn't count). Blocking.

    A file that others may read is NotPermitted with `refuse_exposed`, else an ExposedSecretWarning. Raises
    OSError as open does, Unauthenticated if the secret is too short."""
    secret = _read(path, "the cluster secret", refuse_exposed)
    if len(secret) < MIN_SECRET_BYTES:
        raise Unauthenticated(f"the cluster secret must have at least {MIN_SECRET_BYTES} bytes", path)
    return secret


def read_token(path: str) -> Token:
    """A user's token in a file, with an ExposedSecretWarning if others may read it. Blocking. Raises OSError
    as open does, InvalidArgument if it isn't a token."""
    try:
        text = _read(path, "the token", False).decode("ascii")
    except UnicodeDecodeError:
        raise InvalidArgument("holds no token: make one with ffs user token", path) from None
    try:
        return parse_token(text)
    except InvalidArgument as error:
        error.filename = path
        raise


def environment_credential() -> Credential | None:
    """What FFS_TOKEN_FILE, or else FFS_CLUSTER_SECRET_FILE names; None if neither is set. Blocking."""
    path = os.environ.get(TOKEN_VARIABLE)
    if path:
        return read_token(path)
    path = os.environ.get(SECRET_VARIABLE)
    return read_secret(path) if path else None


def environment_origin() -> str:
    """Where `environment_credential` finds it, for who is refused with it; "": nowhere."""
    for variable in (TOKEN_VARIABLE, SECRET_VARIABLE):
        if path := os.environ.get(variable):
            return f"{path}, which {variable} names"
    return ""


def secret_origin(secret: bytes | str | os.PathLike[str]) -> str:
    """Where a secret that was given as `secret=` comes from, for who is refused with it. Pure."""
    if not isinstance(secret, bytes):
        return f"{os.fspath(secret)}, which secret= names"
    if secret != secret.strip():
        return (
            "the bytes given as secret=, with white space around them that servers don't count: strip() them"
        )
    return "the bytes given as secret="


def _read(path: str, what: str, refuse_exposed: bool) -> bytes:
    with open(path, "rb") as file:
        info = os.fstat(file.fileno())
        who = exposure(info.st_mode, info.st_uid, os.geteuid()) if stat.S_ISREG(info.st_mode) else ""
        if who:
            rights = "read" if info.st_mode & 0o044 else "write"
            said = f"{who} may {rights} {what} here (mode {stat.S_IMODE(info.st_mode):04o}): chmod 600 {path}"
            if refuse_exposed:
                raise NotPermitted(said, path)
            warnings.warn(f"{path}: {said}", ExposedSecretWarning, stacklevel=2)
        return file.read(_MOST_BYTES).strip()
