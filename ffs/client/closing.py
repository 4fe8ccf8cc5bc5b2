"""Closing many files in few requests. docs/client.md, Files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ffs.client.lookups import pages
from ffs.errors import Fenced, FfsError
from ffs.proto import meta
from ffs.proto.common import ErrorReply, to_error

if TYPE_CHECKING:
    from ffs.client.file import File
    from ffs.client.session import Session

_Ending = tuple[int, "File", meta.CloseEntry]  # the place in the caller's list


def close_many(files: Sequence[File]) -> list[FfsError | None]:
    """As `Client.close_many`."""
    found: list[FfsError | None] = [None] * len(files)
    endings: dict[Session, list[_Ending]] = {}
    for at, file in enumerate(files):
        if file.closed:
            continue
        handle = file.bare_handle()
        if handle is None:
            found[at] = _closed_alone(file)
            continue
        ending = handle.begin_close()
        if ending is None:
            file.note_closed()
        elif not ending[1].handle:
            handle.drop_capability(ending[0])
            file.note_closed()
        else:
            endings.setdefault(ending[0], []).append((at, file, ending[1]))
    for session, rows in endings.items():
        for page in pages(rows):
            _close_page(session, page, found)
    return found


def _closed_alone(file: File) -> FfsError | None:
    try:
        file.close()
    except FfsError as error:
        return error
    return None


def _close_page(session: Session, page: Sequence[_Ending], found: list[FfsError | None]) -> None:
    try:
        reply = session.call(meta.CloseMany(entries=tuple(row[2] for row in page)), meta.CloseManyReply)
    except Fenced as error:
        for at, file, entry in page:
            if entry.written:
                found[at] = file.open_handle.fenced_at_close()
                found[at].__cause__ = error  # type: ignore[union-attr]
    except FfsError as error:
        for at, _, _ in page:
            found[at] = error
    else:
        for (at, _, _), result in zip(page, reply.results, strict=True):
            if isinstance(result, ErrorReply):
                found[at] = to_error(result)
    finally:
        for _, file, _ in page:
            file.open_handle.drop_capability(session)
            file.note_closed()
