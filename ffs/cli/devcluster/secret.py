"""The cluster secret of a development cluster: which file holds it. docs/guides/security.md."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ffs.errors import NotFound
from ffs.rpc.secret_file import SECRET_VARIABLE, TOKEN_VARIABLE, read_secret


def choose_secret(asked: str | None, known: str) -> str:
    """The absolute path of the secret's file, read here before any server is started; "": no secret.

    `asked` for on the command line, else named by FFS_CLUSTER_SECRET_FILE, else `known` from the last time: a
    cluster that had one keeps it. NotFound, NotPermitted and Unauthenticated say what is wrong with it.
    """
    for named, origin in (
        (asked, "--secret-file"),
        (os.environ.get(SECRET_VARIABLE), SECRET_VARIABLE),
        (known, "the last ffs up here"),
    ):
        if named:
            return _checked(os.path.abspath(named), origin)
    return ""


def _checked(path: str, origin: str) -> str:
    try:
        read_secret(path, refuse_exposed=True)
    except FileNotFoundError:
        raise NotFound(
            f"the cluster secret that {origin} names isn't there: make one with"
            f" (umask 077; head -c 32 /dev/urandom | base64 > {path})",
            path,
        ) from None
    return path


@contextlib.contextmanager
def no_credentials() -> Iterator[None]:
    """For programs with a cluster of their own that has no secret: what the environment names is for another
    cluster, and children inherit it. Not thread-safe."""
    names = (SECRET_VARIABLE, TOKEN_VARIABLE)
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)
