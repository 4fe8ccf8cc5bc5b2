"""`ffs://` for fsspec: pandas, pyarrow, dask, UPath and all else that opens URLs. docs/guides/fsspec.md.

    pandas.read_parquet("ffs:///data/train.parquet")                 # the cluster of FFS_CLUSTER
    fsspec.open("ffs://10.0.0.1:7100/data/notes.txt", "w")
    fs = fsspec.filesystem("ffs", address="10.0.0.1:7100")

Files are written as a whole or not at all: what is opened with "w" or "x" appears when it is closed, and
an exception before that leaves what was there (FAULTS S29). Everything here blocks and is thread-safe.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import stat as stat_bits
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final

from fsspec.callbacks import DEFAULT_CALLBACK, Callback
from fsspec.spec import AbstractFileSystem
from fsspec.utils import isfilelike, other_paths, stringify_path

from ffs import errors
from ffs.client import moving
from ffs.client.address import resolve_address
from ffs.client.client import Client, connect
from ffs.client.deferred import Compressed, DeferredText, defer, quiet_reader
from ffs.client.mode import parse_mode
from ffs.client.paths import join
from ffs.client.paths import split as split_path
from ffs.client.ranges import read_ranges

__all__ = ["FfsFileSystem"]

_COPY_BYTES: Final = 16 << 20
_MAGIC: Final = frozenset("*?[")
_TYPES: Final = ((stat_bits.S_ISREG, "file"), (stat_bits.S_ISDIR, "directory"), (stat_bits.S_ISLNK, "link"))


class FfsFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no annotations
    """A cluster, as a file system of fsspec.

    address: of the metadata services, "host:port[,host:port...]"; None takes FFS_CLUSTER. auto_mkdir: make
    missing parents of what is written, copied or moved. Other options are those of `ffs.connect`.
    Instances of one process with equal options share one client.
    """

    protocol = "ffs"
    root_marker = "/"
    cachable = True

    def __init__(self, address: str | None = None, auto_mkdir: bool = True, **options: Any) -> None:
        known = {key: options.pop(key) for key in _CONNECT_OPTIONS & options.keys()}
        super().__init__(**options)
        self._address = address
        self._connect_options = known
        self.auto_mkdir = auto_mkdir
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        """The client that does the work. Blocking on first use: connects."""
        client = self._client
        if client is None or client.closed:
            client = self._client = _shared_client(self._address, self._connect_options)
        return client

    @property
    def fsid(self) -> str:
        """The cluster's id: equal for all ways to name one cluster. Blocking."""
        return f"ffs-{self.client.cluster.hex()}"

    # --- URLs -------------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        text = stringify_path(path)
        for prefix in ("ffs::", "ffs:"):
            if text.startswith(prefix):
                _, text = _authority(text.removeprefix(prefix))
                break
        text = text.rstrip("/")
        return text if text.startswith("/") else "/" + text

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        text = stringify_path(path)
        if not text.startswith("ffs://"):
            return {}
        address, _ = _authority(text.removeprefix("ffs:"))
        return {"address": address} if address else {}

    def unstrip_protocol(self, name: str) -> str:
        """The URL of a path: with the address, if this instance was made with one."""
        if name.startswith("ffs://"):
            return name
        return f"ffs://{self._address or ''}{self._strip_protocol(name)}"

    @classmethod
    def _parent(cls, path: Any) -> str:
        return split_path(cls._strip_protocol(path))[0]

    # --- looking ----------------------------------------------------------------------------

    def info(self, path: Any, **kwargs: Any) -> dict[str, Any]:
        """name, size (bytes), type ("file", "directory", "other"), mtime (s), mode, uid, gid, ino,
        nlink, islink; of a symbolic link, what it leads to, and `destination`. Raises NotFound."""
        name = self._strip_protocol(path)
        own = self.client.lstat(name)
        return self._describe(name, own)

    def _describe(self, name: str, own: os.stat_result) -> dict[str, Any]:
        shown, link = own, stat_bits.S_ISLNK(own.st_mode)
        extra: dict[str, Any] = {}
        if link:
            extra["destination"] = self.client.readlink(name)
            # If it leads nowhere, its own attributes are all there is.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, errors.SymlinkLoop):
                shown = self.client.stat(name)
        kind = next((text for test, text in _TYPES if test(shown.st_mode)), "other")
        return {
            "name": name,
            "size": 0 if kind == "directory" else shown.st_size,
            "type": "other" if kind == "link" else kind,
            "islink": link,
            "mode": shown.st_mode,
            "uid": shown.st_uid,
            "gid": shown.st_gid,
            "mtime": shown.st_mtime,
            "ino": shown.st_ino,
            "nlink": shown.st_nlink,
            **extra,
        }

    def ls(self, path: Any, detail: bool = True, **kwargs: Any) -> list[Any]:
        """The entries of a directory (or the file itself): as `info`, or their paths. Raises NotFound."""
        name = self._strip_protocol(path)
        try:
            if not detail:
                return sorted(join(name, entry) for entry in self.client.listdir(name))
            entries = [(entry.path, entry.stat(follow_symlinks=False)) for entry in self.client.scandir(name)]
        except NotADirectoryError:
            found = self.info(name)
            return [found] if detail else [found["name"]]
        found_all = []
        for where, own in sorted(entries, key=lambda pair: pair[0]):
            try:
                found_all.append(self._describe(where, own))
            except FileNotFoundError:
                continue  # a link that went meanwhile
        return found_all

    def exists(self, path: Any, **kwargs: Any) -> bool:
        """Is something there (not a link that leads nowhere)? Other errors than absence are raised."""
        return self.client.exists(self._strip_protocol(path))

    def lexists(self, path: Any, **kwargs: Any) -> bool:
        """`exists`, and True for a link that leads nowhere."""
        return self.client.lexists(self._strip_protocol(path))

    def isdir(self, path: Any) -> bool:
        return self.client.isdir(self._strip_protocol(path))

    def isfile(self, path: Any) -> bool:
        return self.client.isfile(self._strip_protocol(path))

    def islink(self, path: Any) -> bool:
        return self.client.islink(self._strip_protocol(path))

    def size(self, path: Any) -> int:
        """Bytes."""
        return self.client.getsize(self._strip_protocol(path))

    def sizes(self, paths: Iterable[Any]) -> list[int]:
        """Bytes of many files, in few requests."""
        found = self.client.stat_many([self._strip_protocol(path) for path in paths])
        for one in found:
            if isinstance(one, errors.FfsError):
                raise one
        return [one.st_size for one in found if not isinstance(one, errors.FfsError)]

    def du(
        self,
        path: Any,
        total: bool = True,
        maxdepth: int | None = None,
        withdirs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Bytes below `path`: one number, or one for each file."""
        found = self.find(path, maxdepth=maxdepth, withdirs=withdirs, detail=True, **kwargs)
        sizes = {name: info["size"] if info else self.size(name) for name, info in found.items()}
        return sum(sizes.values()) if total else sizes

    def created(self, path: Any) -> datetime:
        """When the file was made."""
        return datetime.fromtimestamp(self.client.attributes(self._strip_protocol(path)).btime_ns / 1e9, UTC)

    def modified(self, path: Any) -> datetime:
        """When the content last changed."""
        return datetime.fromtimestamp(self.client.stat(self._strip_protocol(path)).st_mtime, UTC)

    def ukey(self, path: Any) -> str:
        """Changes when the file does: of inode, length, change time and truncate epoch."""
        found = self.client.attributes(self._strip_protocol(path))
        text = f"{found.ino}.{found.length}.{found.mtime_ns}.{found.ctime_ns}.{found.epoch}"
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def checksum(self, path: Any) -> int:
        """`ukey` as a number."""
        return int(self.ukey(path), 16)

    # --- names ------------------------------------------------------------------------------

    def mkdir(self, path: Any, create_parents: bool = True, **kwargs: Any) -> None:
        """Make a directory; Exists if something is there. kwargs: those of Client.mkdir."""
        name = self._strip_protocol(path)
        if create_parents:
            self.client.makedirs(name, **kwargs)
        else:
            self.client.mkdir(name, **kwargs)

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        self.client.makedirs(self._strip_protocol(path), exist_ok=exist_ok)

    def rmdir(self, path: Any) -> None:
        self.client.rmdir(self._strip_protocol(path))

    def rm_file(self, path: Any) -> None:
        self.client.remove(self._strip_protocol(path))

    _rm = rm_file

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files; with `recursive` directories too, each tree in one transaction."""
        if maxdepth is not None:
            super().rm(path, recursive=recursive, maxdepth=maxdepth)
            return
        files: list[str] = []
        for name in self._named(path):
            if self.client.isdir(name) and not self.client.islink(name):
                if not recursive:
                    raise errors.IsADirectory("it is a directory; give recursive=True", name)
                self.client.rmtree(name)
            else:
                files.append(name)
        for error in self.client.unlink_many(files):
            if error is not None:
                raise error

    def _named(self, path: Any) -> list[str]:
        """Paths that may be globs, as paths."""
        names: list[str] = []
        for one in path if isinstance(path, list | tuple | set) else [path]:
            name = self._strip_protocol(one)
            if _MAGIC.isdisjoint(name):
                names.append(name)
            else:
                names += self.expand_path(name)
        return names

    def mv(
        self, path1: Any, path2: Any, recursive: bool = True, maxdepth: int | None = None, **kwargs: Any
    ) -> None:
        """A rename: atomic, whole directories too. Into `path2` if that is a directory or ends with "/".
        Where a quota counts one of the two and not the other, by a copy."""
        if isinstance(path1, list | tuple | set) or not _MAGIC.isdisjoint(stringify_path(path1)):
            sources = self._named(path1)
            if isinstance(path2, list | tuple):
                targets = list(path2)
            else:
                self._make_directory(path2)
                targets = other_paths(sources, self._strip_protocol(path2), flatten=True)
        else:
            sources, targets = [self._strip_protocol(path1)], [path2]
        for source, target in zip(sources, targets, strict=True):
            self._move(source, target)

    def _move(self, source: str, target: Any) -> None:
        into = stringify_path(target).endswith("/")
        name = self._strip_protocol(target)
        if source == name:
            return
        if into or self.client.isdir(name):
            self._make_directory(name)
            name = join(name, split_path(source)[1])
        else:
            self._make_parent(name)
        moving.move(self.client, source, name)

    def _make_directory(self, path: Any) -> None:
        if self.auto_mkdir:
            self.client.makedirs(self._strip_protocol(path), exist_ok=True)

    def _make_parent(self, name: str) -> None:
        self._make_directory(split_path(name)[0])

    def link(self, source: Any, target: Any, **kwargs: Any) -> None:
        self.client.link(self._strip_protocol(source), self._strip_protocol(target), **kwargs)

    def symlink(self, source: Any, target: Any, **kwargs: Any) -> None:
        self.client.symlink(self._strip_protocol(source), self._strip_protocol(target), **kwargs)

    def chmod(self, path: Any, mode: int) -> None:
        self.client.chmod(self._strip_protocol(path), mode)

    def touch(self, path: Any, truncate: bool = True, **kwargs: Any) -> None:
        """An empty file, or (truncate=False) at least its modification time."""
        name = self._strip_protocol(path)
        self._make_parent(name)
        self.client.create_many([name], exist_ok=True)
        if truncate:
            self.client.truncate(name, 0)
        self.client.utime(name)

    # --- content ----------------------------------------------------------------------------

    def open(
        self,
        path: Any,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: dict[str, Any] | None = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """A file object, in all of Python's modes. block_size: bytes of the buffer.

        Modes w and x give a file that appears when it is closed. In a transaction it appears when
        that ends. Closing one while an exception is on its way that came after the opening publishes
        nothing and raises that exception again. kwargs: encoding, errors, newline; permissions, table,
        chunk_size, stripe as in `ffs.open`.
        """
        name = self._strip_protocol(path)
        text: dict[str, Any] = {
            key: kwargs.pop(key) for key in ("encoding", "errors", "newline") if key in kwargs
        }
        binary = self._open(
            name,
            mode.replace("t", "").replace("b", "") + "b",
            block_size=block_size,
            autocommit=kwargs.pop("autocommit", not self._intrans),
            **kwargs,
        )
        try:
            return _layers(binary, name, mode, compression, text)
        except BaseException:
            binary.discard()
            raise

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        parsed = parse_mode(mode)
        size = _buffer_bytes(block_size)
        if parsed.creating:
            self._make_parent(path)
        if not (parsed.truncating or parsed.exclusive):
            if parsed.writing and not autocommit:
                raise errors.Unsupported(f"mode {mode!r} changes a file in place: not in a transaction", path)
            if parsed.writing:
                file = self.client.open(path, mode, size, **kwargs)
            else:
                file = quiet_reader(self.client.open(path, mode, 0, **kwargs), size)
            file.size = file.raw_file.size
        else:
            raw = self.client.open(path, mode, 0, atomic=True, **kwargs)
            file = defer(raw, size, autocommit)
            if not autocommit:
                self.transaction.files.append(file)
        file.fs, file.path = self, path
        return file

    def cat_file(self, path: Any, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """The content, or the range [start, end): negative from the end, as of a slice."""
        [content] = read_ranges(self.client, [(self._strip_protocol(path), start, end)])
        if isinstance(content, errors.FfsError):
            raise content
        return content

    def cat_ranges(
        self,
        paths: list[Any],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """Many ranges of many files: one request to metadata, one submission of a ring.

        `max_gap` has no use here: a small read costs no round trip of its own. on_error: "return" gives
        errors in place of bytes."""
        if not isinstance(paths, list):
            raise TypeError(f"paths: give a list, not {type(paths).__name__}")
        starts = starts if isinstance(starts, list) else [starts] * len(paths)
        ends = ends if isinstance(ends, list) else [ends] * len(paths)
        if not len(paths) == len(starts) == len(ends):
            raise ValueError(
                f"{len(paths)} paths, {len(starts)} starts, {len(ends)} ends: give as many of each"
            )
        wanted = [
            (self._strip_protocol(path), start, end)
            for path, start, end in zip(paths, starts, ends, strict=True)
        ]
        found = read_ranges(self.client, wanted)
        if on_error != "return":
            for one in found:
                if isinstance(one, errors.FfsError):
                    raise one
        return found

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any) -> Any:
        """Contents of one file, or of many as a dict, in few requests."""
        names = self.expand_path(path, recursive=recursive)
        if len(names) == 1 and not isinstance(path, list) and names[0] == self._strip_protocol(path):
            return self.cat_file(names[0], **kwargs)
        names = [name for name in names if not (recursive and self.client.isdir(name))]
        found = read_ranges(self.client, [(name, kwargs.get("start"), kwargs.get("end")) for name in names])
        out: dict[str, Any] = {}
        for name, content in zip(names, found, strict=True):
            if isinstance(content, errors.FfsError):
                if on_error == "raise":
                    raise content
                if on_error == "omit":
                    continue
            out[name] = content
        return out

    def pipe_file(self, path: Any, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write a file in one step. mode "create": Exists if something is there, decided atomically."""
        with self.open(path, "xb" if mode == "create" else "wb", **kwargs) as file:
            file.write(value)

    def cp_file(self, path1: Any, path2: Any, **kwargs: Any) -> None:
        """Copy a file (content and mode), or make a directory. The copy appears whole."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.client.isdir(source):
            self.client.makedirs(target, exist_ok=True)
            return
        with self.client.open(source, "rb", 0) as reader:
            bits = reader.stat().st_mode & 0o7777
            with self.open(target, "wb", permissions=bits) as writer:
                _pour(reader, writer.write, DEFAULT_CALLBACK)

    def get_file(
        self,
        rpath: Any,
        lpath: Any,
        callback: Callback = DEFAULT_CALLBACK,
        outfile: Any = None,
        **kwargs: Any,
    ) -> None:
        """Copy a file here. A local file appears whole, under its name, when all of it is there."""
        source = self._strip_protocol(rpath)
        if outfile is None and isfilelike(lpath):
            outfile = lpath
        if outfile is None and self.client.isdir(source):
            os.makedirs(lpath, exist_ok=True)
            return
        with self.client.open(source, "rb", 0) as reader:
            callback.set_size(reader.size)
            if outfile is not None:
                _pour(reader, outfile.write, callback)
                return
            target = os.fspath(stringify_path(lpath))
            folder = os.path.dirname(target) or "."
            os.makedirs(folder, exist_ok=True)
            if os.path.isdir(target):
                raise IsADirectoryError(21, "it is a directory; give the name of a file", target)
            _pour_into_new_file(reader, target, folder, callback)

    def put_file(
        self,
        lpath: Any,
        rpath: Any,
        callback: Callback = DEFAULT_CALLBACK,
        mode: str = "overwrite",
        **kwargs: Any,
    ) -> None:
        """Copy a local file there. It appears whole. mode "create": Exists if something is there."""
        source, target = os.fspath(stringify_path(lpath)), self._strip_protocol(rpath)
        if os.path.isdir(source):
            self.client.makedirs(target, exist_ok=True)
            return
        with open(source, "rb", 0) as reader:
            callback.set_size(os.fstat(reader.fileno()).st_size)
            self.client.makedirs(split_path(target)[0], exist_ok=True)
            with self.open(target, "xb" if mode == "create" else "wb", **kwargs) as writer:
                _pour(reader, writer.write, callback)


_CONNECT_OPTIONS: Final = frozenset(inspect.signature(connect).parameters) - {"address"}

_clients: dict[Any, Client] = {}


def _shared_client(address: str | None, options: dict[str, Any]) -> Client:
    """One client for all instances of a cluster and options: fsspec makes an instance a thread."""
    key = (resolve_address(address), tuple(sorted(options.items())))
    client = _clients.get(key)
    if client is None or client.closed:
        made = connect(str(key[0]), **options)
        if client is not None:
            _clients.pop(key, None)
        client = _clients.setdefault(key, made)
        if client is not made:
            made.close()  # another thread was first
    return client


def _authority(text: str) -> tuple[str, str]:
    """(address, path) of what follows "ffs:": "//host:port/path", "///path", "/path"."""
    if not text.startswith("//"):
        return "", text
    address, slash, path = text[2:].partition("/")
    if address and ":" not in address:
        raise errors.InvalidArgument(
            f"{address!r} is no host:port: write ffs:///{address}{slash}{path} for the cluster of"
            " FFS_CLUSTER, or ffs://host:port/path",
            f"ffs:{text}",
        )
    return address, slash + path


def _buffer_bytes(block_size: Any) -> int:
    """`buffering` of open: fsspec's callers say "default", None or 0 where they have no wish."""
    return block_size if isinstance(block_size, int) and block_size > 1 else -1


def _layers(binary: Any, name: str, mode: str, compression: str | None, text: dict[str, Any]) -> Any:
    """Compression and text over a binary file, as fsspec has them."""
    if compression is not None:
        from fsspec.compression import compr
        from fsspec.core import get_compression

        codec = get_compression(name, compression)
        if codec is not None:
            binary = Compressed(compr[codec](binary, mode=mode[0]), binary)
    return binary if "b" in mode else DeferredText(binary, **text)


def _pour(reader: Any, write: Callable[[memoryview], object], callback: Callback) -> None:
    buffer = memoryview(bytearray(_COPY_BYTES))
    while count := reader.readinto(buffer):
        write(buffer[:count])
        callback.relative_update(count)


def _pour_into_new_file(reader: Any, target: str, folder: str, callback: Callback) -> None:
    unfinished = os.path.join(folder, f".{os.path.basename(target)[:200]}.{os.urandom(6).hex()}")
    with open(unfinished, "xb") as writer:
        try:
            _pour(reader, writer.write, callback)
            writer.close()
            with contextlib.suppress(FileNotFoundError):  # an overwritten file keeps its mode
                os.chmod(unfinished, stat_bits.S_IMODE(os.stat(target).st_mode))
            os.replace(unfinished, target)
        except BaseException:
            os.unlink(unfinished)
            raise
