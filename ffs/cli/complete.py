"""Paths of the cluster that a word may become; and `ffs __complete`, which shells ask for them.

`ffs __complete [--cluster ADDRESS] [--] WORD` prints one path a line, directories with a '/'. It is quick
and quiet: without a cluster, or with any other trouble, it prints nothing and ends with 0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ffs.cli.location import SCHEME, parse_remote

if TYPE_CHECKING:
    from ffs.client.client import Client

_PAGE = 1000
_MOST = 2000


def split_word(text: str) -> tuple[str, str]:
    """(what stays as it was typed, the beginning of the name) of a path. Pure."""
    head, slash, name = text.rpartition("/")
    if not slash and text.startswith(SCHEME):
        return SCHEME, text[len(SCHEME) :]
    return head + slash, name


def address_of(text: str) -> str | None:
    """The cluster that a word names itself. Pure."""
    if not text.startswith(f"{SCHEME}//"):
        return None
    address, slash, _ = text[len(SCHEME) + 2 :].partition("/")
    return address if slash and address else None


def remote_paths(client: Client, text: str) -> list[str]:
    """What `text` may become, as it would be typed. Blocking; OSErrors."""
    from ffs.client.paths import decode_text, encode_text, wire_path
    from ffs.proto import meta, records

    typed, beginning = split_word(text)
    folder = parse_remote(typed or ".").path
    prefix = encode_text(beginning)
    # Names come in byte order: those with this beginning stand together, and begin after this one.
    after = prefix[:-1] + bytes([prefix[-1] - 1]) + b"\xff" * 8 if prefix else b""
    request = meta.ReadDir(path=wire_path(folder), after=after[:255], limit=_PAGE)
    found: list[str] = []
    while len(found) < _MOST:
        page = client.core.ask(request, meta.ReadDirReply)
        for entry in page.entries:
            name = decode_text(entry.name)
            if not entry.name.startswith(prefix):
                if entry.name > prefix:
                    return found
            elif beginning.startswith(".") or not name.startswith("."):
                found.append(typed + name + ("/" if entry.type == records.DIRECTORY else ""))
        if not page.more or not page.entries:
            return found
        request = meta.ReadDir(ino=page.ino, after=page.entries[-1].name, limit=_PAGE, ticket=page.ticket)
    return found


def main(argv: Sequence[str]) -> int:
    """`ffs __complete`."""
    from ffs.client.client import connect

    words = list(argv)
    address = None
    if words[:1] == ["--cluster"]:
        address, words = words[1] if len(words) > 1 else None, words[2:]
    if words[:1] == ["--"]:
        words = words[1:]
    text = words[0] if words else ""
    try:
        address = address_of(text) or address
        with connect(address, connect_timeout=1.0, request_timeout=2.0) as client:
            paths = remote_paths(client, text or "/")
    except (OSError, ValueError):
        return 0  # nobody reads an error here: there is nothing to offer, and that is all
    for path in paths:
        if "\n" not in path:
            sys.stdout.buffer.write(path.encode("utf-8", "surrogateescape") + b"\n")
    sys.stdout.buffer.flush()
    return 0
