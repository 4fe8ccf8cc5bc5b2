"""The calls of Client that open and copy files. docs/client.md, Files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ffs import errors
from ffs.client import moving
from ffs.client.handle import OpenFile
from ffs.client.lookups import pages
from ffs.client.mode import parse_mode
from ffs.client.namespace import Namespace
from ffs.client.paths import PathLike, check_path, join, split, wire_path
from ffs.proto import meta
from ffs.proto.common import ErrorReply, to_error

if TYPE_CHECKING:
    from ffs.client.file import File

_COPY_BYTES = 32 << 20


class FileCalls(Namespace):
    """Mixed into Client."""

    def _opened(self, top: Any) -> None:
        raise NotImplementedError

    def open(
        self,
        path: PathLike,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        *,
        permissions: int = 0o666,
        table: str | int | None = None,
        chunk_size: int | None = None,
        stripe: int | None = None,
        atomic: bool = False,
    ) -> Any:
        """`ffs.open` with this client."""
        from ffs.client.opening import open_path

        return open_path(
            path,
            mode,
            buffering,
            encoding,
            errors,
            newline,
            client=self,  # type: ignore[arg-type]
            permissions=permissions,
            table=table,
            chunk_size=chunk_size,
            stripe=stripe,
            atomic=atomic,
        )

    def open_many(
        self, paths: Iterable[PathLike], mode: str = "rb", *, permissions: int = 0o666
    ) -> list[Any | errors.FfsError]:
        """Open many files in few requests: for each a raw `File`, or its error. Binary modes only.

        What is opened for writing must be closed, one by one or by `close_many`. Blocking.
        """
        from ffs.client.file import File
        from ffs.client.opening import check_type, flags_of

        parsed = parse_mode(mode)
        if parsed.text:
            raise ValueError(f"open_many gives raw files: use a binary mode, not {mode!r}")
        core = self.core
        texts = [check_path(path) for path in paths]
        flags = flags_of(parsed)
        bits = permissions & 0o7777 & ~core.umask
        found: list[Any | errors.FfsError] = []
        for page in pages(texts):
            entries = tuple(meta.OpenEntry(wire_path(text), flags, bits) for text in page)
            session, reply = core.change_under_session(meta.OpenMany(entries=entries), meta.OpenManyReply)
            for text, result in zip(page, reply.results, strict=True):
                if isinstance(result, ErrorReply):
                    found.append(to_error(result))
                    continue
                handle = OpenFile(self.core_of_process, text, flags)
                handle.adopt(core, session, result)
                try:
                    check_type(result.attributes.type, text)
                except errors.FfsError as error:
                    handle.close()
                    found.append(error)
                    continue
                file = File(self, handle, parsed.raw)  # type: ignore[arg-type]
                self._opened(file)
                found.append(file)
        return found

    def close_many(self, files: Iterable[File]) -> list[errors.FfsError | None]:
        """Close many raw files (`open_many`, `buffering=0`) in few requests, publishing their lengths: None,
        or its error, for each; all are closed. Blocking."""
        from ffs.client.closing import close_many

        return close_many(list(files))

    def copyfile(self, source: PathLike, target: PathLike) -> str:
        """As shutil.copyfile, within the store: content only. Returns the target. Blocking."""
        source_text, target_text = check_path(source), check_path(target)
        with self.open(source_text, "rb", 0) as reader:
            try:
                there = self.attributes(target_text)
            except FileNotFoundError:
                pass
            else:
                if there.ino == reader.inode:
                    raise errors.InvalidArgument(
                        "source and target are the same file", source_text, target_text
                    )
            with self.open(target_text, "wb", 0) as writer:
                buffer = bytearray(_COPY_BYTES)
                view = memoryview(buffer)
                while count := reader.readinto(buffer):
                    writer.write(view[:count])
        return target_text

    def copy(self, source: PathLike, target: PathLike) -> str:
        """As shutil.copy: content and mode; into `target` where that is a directory. Blocking."""
        target_text = check_path(target)
        if self.isdir(target_text):
            target_text = join(target_text, split(check_path(source))[1])
        self.copyfile(source, target_text)
        self.chmod(target_text, self.stat(source).st_mode & 0o7777)
        return target_text

    def move(self, source: PathLike, target: PathLike) -> str:
        """As shutil.move within the store: a rename; into `target` where that is a directory. Where a quota
        counts one of the two and not the other, by a copy (ffs.client.moving). Returns the path. Blocking."""
        target_text = check_path(target)
        if self.isdir(target_text):
            target_text = join(target_text, split(check_path(source))[1])
            if self.lexists(target_text):
                raise errors.Exists("the directory has an entry of that name", target_text)
        moving.move(self, check_path(source), target_text)  # type: ignore[arg-type]
        return target_text
