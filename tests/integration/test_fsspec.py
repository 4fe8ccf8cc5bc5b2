"""fsspec, UPath, pandas and pyarrow over the store. docs/guides/fsspec.md. FAULTS S29."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas
import pyarrow
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet
import pytest
from fsspec.callbacks import Callback
from upath import UPath

import ffs
from ffs import errors
from ffs.client.client import Client
from ffs.fsspec import FfsFileSystem
from ffs.upath import FfsPath

CHUNK = 65536


@pytest.fixture
def fs(address: str) -> FfsFileSystem:
    return FfsFileSystem(address)


@pytest.fixture
def url(address: str, home: str) -> str:
    return f"ffs://{address}{home}"


# --- URLs -----------------------------------------------------------------------------------


def test_urls_name_the_cluster_or_leave_it_to_the_environment(
    address: str, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, path = fsspec.core.url_to_fs(f"ffs://{address}{home}/a b//c/")
    assert (type(fs), path) == (FfsFileSystem, f"{home}/a b//c")
    assert fs.unstrip_protocol(path) == f"ffs://{address}{home}/a b//c"
    monkeypatch.setenv("FFS_CLUSTER", address)
    other, path = fsspec.core.url_to_fs("ffs:///x")
    assert path == "/x"
    assert other.fsid == fs.fsid
    assert other.client is fs.client
    assert other.unstrip_protocol(path) == "ffs:///x"
    assert FfsFileSystem._strip_protocol("ffs://") == "/"
    assert FfsFileSystem._strip_protocol("x/y") == "/x/y"
    assert FfsFileSystem._strip_protocol(Path("/x")) == "/x"


def test_a_host_without_port_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"'models' is no host:port: write ffs:///models/x"):
        fsspec.open("ffs://models/x").open()


def test_wrong_options_and_nobody_there_are_said(home: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="transport"):
        fsspec.filesystem("ffs", address="127.0.0.1:1", transport="pigeon").ls("/")
    with pytest.raises(errors.Unreachable):
        fsspec.filesystem("ffs", address="127.0.0.1:1").exists("/")  # not "False"


def test_threads_and_pickles_share_one_client(fs: FfsFileSystem, home: str) -> None:
    fs.pipe_file(f"{home}/x", b"1")
    seen: list[Client] = []
    thread = threading.Thread(target=lambda: seen.append(FfsFileSystem(fs._address).client))
    thread.start()
    thread.join()
    again = pickle.loads(pickle.dumps(fs))
    assert seen == [fs.client]
    assert again.client is fs.client
    assert again.cat_file(f"{home}/x") == b"1"


# --- looking --------------------------------------------------------------------------------


def test_listings_and_links(fs: FfsFileSystem, client: Client, home: str) -> None:
    fs.pipe({f"{home}/d/a": b"12", f"{home}/d/e/b": b"345"})
    client.symlink("a", f"{home}/d/good")
    client.symlink("nowhere", f"{home}/d/bad")
    assert fs.ls(f"{home}/d", detail=False) == [f"{home}/d/{name}" for name in ("a", "bad", "e", "good")]
    kinds = {entry["name"].rpartition("/")[2]: (entry["type"], entry["size"]) for entry in fs.ls(f"{home}/d")}
    assert kinds == {"a": ("file", 2), "bad": ("other", 7), "e": ("directory", 0), "good": ("file", 2)}
    assert fs.info(f"{home}/d/good")["destination"] == "a"
    assert fs.ls(f"{home}/d/a", detail=False) == [f"{home}/d/a"]
    assert (fs.exists(f"{home}/d/bad"), fs.lexists(f"{home}/d/bad")) == (False, True)
    assert (fs.islink(f"{home}/d/good"), fs.islink(f"{home}/d/a")) == (True, False)
    assert fs.find(f"{home}/d") == [f"{home}/d/{name}" for name in ("a", "bad", "e/b", "good")]
    assert fs.glob(f"{home}/**/b") == [f"{home}/d/e/b"]
    assert fs.du(f"{home}/d/e") == 3
    assert fs.sizes([f"{home}/d/a", f"{home}/d/e/b"]) == [2, 3]
    with pytest.raises(FileNotFoundError, match="nothing"):
        fs.ls(f"{home}/nothing")
    with pytest.raises(FileNotFoundError):
        fs.sizes([f"{home}/d/a", f"{home}/nothing"])


def test_ukey_changes_with_the_content(fs: FfsFileSystem, home: str) -> None:
    path = f"{home}/x"
    fs.pipe_file(path, b"1")
    first = fs.ukey(path)
    assert fs.ukey(path) == first
    fs.pipe_file(path, b"2")
    assert fs.ukey(path) != first
    assert fs.checksum(path) == int(fs.ukey(path), 16)
    assert fs.created(path) <= fs.modified(path)


# --- names ----------------------------------------------------------------------------------


def test_a_move_is_a_rename(fs: FfsFileSystem, client: Client, home: str) -> None:
    fs.pipe({f"{home}/a/x": b"1", f"{home}/a/y": b"2"})
    inode = client.stat(f"{home}/a").st_ino
    fs.mv(f"{home}/a", f"{home}/new/b")
    assert client.stat(f"{home}/new/b").st_ino == inode
    fs.mkdir(f"{home}/c")
    fs.mv(f"{home}/new/b/x", f"{home}/c")
    assert fs.cat_file(f"{home}/c/x") == b"1"
    fs.mv([f"{home}/c/x", f"{home}/new/b/y"], f"{home}/both")
    assert fs.ls(f"{home}/both", detail=False) == [f"{home}/both/x", f"{home}/both/y"]
    fs.mv(f"{home}/both/?", f"{home}/all")
    assert fs.ls(f"{home}/all", detail=False) == [f"{home}/all/x", f"{home}/all/y"]
    strict = FfsFileSystem(fs._address, auto_mkdir=False)
    with pytest.raises(FileNotFoundError):
        strict.mv(f"{home}/all/x", f"{home}/missing/x")
    with pytest.raises(FileNotFoundError):
        strict.open(f"{home}/missing/x", "wb")


def test_removing(fs: FfsFileSystem, home: str) -> None:
    fs.pipe({f"{home}/a/x": b"", f"{home}/b/y": b"", f"{home}/b/z": b""})
    with pytest.raises(IsADirectoryError, match="recursive=True"):
        fs.rm(f"{home}/a")
    fs.rm([f"{home}/a"], recursive=True)
    fs.rm(f"{home}/b/?")
    assert fs.find(home) == []
    with pytest.raises(FileNotFoundError):
        fs.rm(f"{home}/b/y")
    fs.rmdir(f"{home}/b")


# --- reading --------------------------------------------------------------------------------


def test_cat_ranges_are_slices(fs: FfsFileSystem, client: Client, home: str) -> None:
    data = [random.Random(i).randbytes(3 * CHUNK + 17 * i) for i in range(3)]
    paths = [f"{home}/{i}" for i in range(3)]
    for path, content in zip(paths, data, strict=True):
        with client.open(path, "wb", chunk_size=CHUNK) as file:
            file.write(content)
    rng = random.Random(7)
    bounds = [None, 0, 1, -1, CHUNK, CHUNK - 1, -CHUNK, 3 * CHUNK, 10 * CHUNK, -10 * CHUNK]
    which = [rng.randrange(3) for _ in range(300)]
    starts, ends = ([rng.choice(bounds) for _ in which] for _ in "ab")
    got = fs.cat_ranges([paths[i] for i in which], starts, ends)
    assert got == [data[i][a:b] for i, a, b in zip(which, starts, ends, strict=True)]
    assert fs.cat_ranges(paths, 5, 10) == [content[5:10] for content in data]
    assert fs.cat_ranges([], [], []) == []
    for a, b in ((None, None), (-5, None), (2, -2), (7, 3)):
        assert fs.cat_file(paths[0], a, b) == data[0][a:b]
    assert fs.cat(paths) == dict(zip(paths, data, strict=True))
    assert fs.cat(home, recursive=True) == dict(zip(paths, data, strict=True))


def test_cat_ranges_is_one_submission(
    fs: FfsFileSystem, client: Client, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ffs.client.ior import Ior

    paths = [f"{home}/{i}" for i in range(20)]
    fs.pipe({path: path.encode() for path in paths})
    submissions: list[int] = []
    submit = Ior.submit
    monkeypatch.setattr(Ior, "submit", lambda ring: (submissions.append(ring._prepared), submit(ring))[1])
    assert fs.cat_ranges(paths, 1, None) == [path.encode()[1:] for path in paths]
    assert submissions == [20]


def test_errors_of_single_ranges(fs: FfsFileSystem, home: str) -> None:
    fs.pipe_file(f"{home}/x", b"123")
    good, bad = fs.cat_ranges([f"{home}/x", f"{home}/y"], 0, 2)
    assert good == b"12"
    assert isinstance(bad, FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges([f"{home}/x", f"{home}/y"], 0, 2, on_error="raise")
    assert fs.cat([f"{home}/x", f"{home}/y"], on_error="omit") == {f"{home}/x": b"123"}
    with pytest.raises(ValueError, match="1 starts"):
        fs.cat_ranges([f"{home}/x", f"{home}/x"], [0], [1, 2])


# --- writing --------------------------------------------------------------------------------


class Broken(Exception):
    pass


def _body(file: Any) -> None:
    file.write("cut" if isinstance(file, io.TextIOBase) else b"cut")
    raise Broken


def through_fs(fs: FfsFileSystem, url: str, path: str, **options: Any) -> None:
    with fs.open(path, **options) as file:
        _body(file)


def through_url(fs: FfsFileSystem, url: str, path: str, **options: Any) -> None:
    with fsspec.open(url, **options) as file:
        _body(file)


def through_finally(fs: FfsFileSystem, url: str, path: str, **options: Any) -> None:
    file = fs.open(path, **options)
    try:
        _body(file)
    finally:
        file.close()


def through_generator(fs: FfsFileSystem, url: str, path: str, **options: Any) -> None:
    def write() -> Any:
        with fs.open(path, **options) as file:
            file.write(b"cut" if "b" in options["mode"] else "cut")
            yield
            raise Broken

    for _ in write():
        pass


@pytest.mark.parametrize("how", [through_fs, through_url, through_finally, through_generator])
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "wb"},
        {"mode": "w"},
        {"mode": "wb", "compression": "gzip"},
        {"mode": "wt", "compression": "bz2", "encoding": "utf-16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("before", [b"old", None])
def test_an_exception_publishes_nothing(
    fs: FfsFileSystem,
    url: str,
    home: str,
    how: Callable[..., None],
    options: dict[str, Any],
    before: bytes | None,
) -> None:
    if before is not None:
        fs.pipe_file(f"{home}/x", before)
    with pytest.raises(Broken):
        how(fs, f"{url}/x", f"{home}/x", **options)
    assert (fs.cat_file(f"{home}/x") if fs.exists(f"{home}/x") else None) == before
    assert fs.ls(home, detail=False) == ([f"{home}/x"] if before else [])


def test_a_file_that_is_opened_and_closed_inside_a_handler_is_published(fs: FfsFileSystem, home: str) -> None:
    try:
        raise Broken
    except Broken:
        with fs.open(f"{home}/x", "w") as file:
            file.write("kept")
        file = fs.open(f"{home}/y", "wb")
        file.write(b"kept")
        file.close()
    assert fs.cat([f"{home}/x", f"{home}/y"]) == {f"{home}/x": b"kept", f"{home}/y": b"kept"}


def test_closing_inside_a_handler_of_something_newer_isnt_silent(fs: FfsFileSystem, home: str) -> None:
    file = fs.open(f"{home}/x", "wb")
    file.write(b"all")
    cause = Broken()

    def handle() -> None:
        try:
            raise cause
        except Broken:
            file.close()

    with pytest.raises(Broken) as again:
        handle()
    assert again.value is cause
    assert "nothing was published" in cause.__notes__[0]
    assert file.closed
    assert not fs.exists(f"{home}/x")


def test_a_dropped_file_is_not_published(fs: FfsFileSystem, home: str) -> None:
    for options in ({"mode": "wb"}, {"mode": "w"}, {"mode": "w", "compression": "gzip"}):
        with pytest.warns(ResourceWarning, match="unclosed file"):
            fs.open(f"{home}/x", **options).write("x" if options["mode"] == "w" else b"x")
        assert not fs.exists(f"{home}/x")


@pytest.mark.parametrize("compression", [None, "gzip", "bz2", "xz", "infer"])
def test_compression_and_text(fs: FfsFileSystem, url: str, home: str, compression: str | None) -> None:
    text = "Zeile\r\näöü\n" * 1000
    path = f"{home}/x.gz"
    with fs.open(path, "w", compression=compression, encoding="utf-8", newline="") as file:
        file.write(text)
    with fs.open(path, "r", compression=compression, encoding="utf-8", newline="") as file:
        assert file.read() == text
    with fsspec.open(f"{url}/x.gz", "rt", compression=compression, encoding="utf-8", newline="") as file:
        assert file.read() == text
    if compression in ("gzip", "infer"):
        assert gzip.decompress(fs.cat_file(path)).decode() == text


def test_appending_and_updating_in_place(fs: FfsFileSystem, home: str) -> None:
    fs.pipe_file(f"{home}/x", b"one")
    with fs.open(f"{home}/x", "ab") as file:
        file.write(b" two")
    with fs.open(f"{home}/x", "r+b") as file:
        file.write(b"O")
    with fs.open(f"{home}/y", "w+b") as file:
        file.write(b"abc")
        file.seek(1)
        assert file.read() == b"bc"
    assert fs.cat([f"{home}/x", f"{home}/y"]) == {f"{home}/x": b"One two", f"{home}/y": b"abc"}


def test_a_transaction_publishes_all_at_its_end_or_nothing(fs: FfsFileSystem, home: str) -> None:
    fs.pipe_file(f"{home}/a", b"old")
    with fs.transaction:
        with fs.open(f"{home}/a", "wb") as file:
            file.write(b"new")
        fs.pipe_file(f"{home}/b", b"new")
        with fs.open(f"{home}/c", "w", compression="gzip") as file:
            file.write("new")
        assert file.closed
        with pytest.raises(ValueError, match="closed"):
            file.write("more")
        assert fs.cat_file(f"{home}/a") == b"old"
        assert not fs.exists(f"{home}/b")
        with pytest.raises(errors.Unsupported, match="in place"):
            fs.open(f"{home}/a", "ab")
    assert fs.cat_file(f"{home}/a") == fs.cat_file(f"{home}/b") == b"new"
    assert gzip.decompress(fs.cat_file(f"{home}/c")) == b"new"

    def broken() -> None:
        with fs.transaction:
            fs.pipe_file(f"{home}/a", b"newer")
            fs.pipe_file(f"{home}/d", b"newer")
            raise Broken

    with pytest.raises(Broken):
        broken()
    assert fs.cat_file(f"{home}/a") == b"new"
    assert not fs.exists(f"{home}/d")


def test_exclusive_creation_has_one_winner(fs: FfsFileSystem, home: str) -> None:
    won: list[int] = []
    barrier = threading.Barrier(8)

    def create(number: int) -> None:
        barrier.wait()
        try:
            fs.pipe_file(f"{home}/x", b"%d" % number, mode="create")
        except FileExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=create, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert fs.cat_file(f"{home}/x") == b"%d" % won[0]


def test_touch(fs: FfsFileSystem, home: str) -> None:
    fs.pipe_file(f"{home}/x", b"1")
    before = fs.modified(f"{home}/x")
    fs.touch(f"{home}/x", truncate=False)
    assert fs.cat_file(f"{home}/x") == b"1"
    assert fs.modified(f"{home}/x") > before
    fs.touch(f"{home}/x")
    assert fs.cat_file(f"{home}/x") == b""


# --- copying --------------------------------------------------------------------------------


class Progress(Callback):  # type: ignore[misc]
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.children: list[Progress] = []

    def branched(self, path_1: Any, path_2: Any, **kwargs: Any) -> Progress:
        self.children.append(Progress())
        return self.children[-1]


def test_put_and_get_tell_their_progress(fs: FfsFileSystem, home: str, tmp_path: Path) -> None:
    content = {f"d/{i}": random.Random(i).randbytes(i * 100_000) for i in range(4)}
    for name, data in content.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    up, down = Progress(), Progress()
    fs.put(f"{tmp_path}/d", f"{home}/up", recursive=True, callback=up)
    fs.get(f"{home}/up", f"{tmp_path}/down", recursive=True, callback=down)
    for progress in (up, down):
        assert progress.value == progress.size
        assert sum(child.value for child in progress.children) == sum(map(len, content.values()))
    for name, data in content.items():
        assert (tmp_path / "down" / os.path.basename(name)).read_bytes() == data


def test_a_failed_get_leaves_the_local_file_alone(
    fs: FfsFileSystem, home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs.pipe_file(f"{home}/x", b"new" * 100)
    (tmp_path / "x").write_bytes(b"old")
    os.chmod(tmp_path / "x", 0o600)

    class Failing(Progress):
        def relative_update(self, inc: int = 1) -> None:
            raise Broken

    with pytest.raises(Broken):
        fs.get_file(f"{home}/x", f"{tmp_path}/x", callback=Failing())
    assert os.listdir(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"
    fs.get_file(f"{home}/x", f"{tmp_path}/x")
    assert (tmp_path / "x").read_bytes() == b"new" * 100
    assert os.stat(tmp_path / "x").st_mode & 0o777 == 0o600


# --- the libraries --------------------------------------------------------------------------


def table() -> pandas.DataFrame:
    rng = np.random.default_rng(5)
    return pandas.DataFrame({"n": np.arange(20_000), "x": rng.normal(size=20_000), "s": ["é"] * 20_000})


def test_pandas(url: str, fs: FfsFileSystem, home: str) -> None:
    frame = table()
    frame.to_parquet(f"{url}/t.parquet")
    frame.to_csv(f"{url}/t.csv.gz", index=False)
    pandas.testing.assert_frame_equal(pandas.read_parquet(f"{url}/t.parquet"), frame)
    pandas.testing.assert_frame_equal(pandas.read_parquet(f"{url}/t.parquet", columns=["x"]), frame[["x"]])
    pandas.testing.assert_frame_equal(pandas.read_csv(f"{url}/t.csv.gz"), frame)


def test_a_table_that_cant_be_written_isnt_published(url: str, fs: FfsFileSystem, home: str) -> None:
    frame = pandas.DataFrame({"s": ["plain"] * 100_000 + ["é"]})
    fs.pipe_file(f"{home}/t.csv", b"old")
    with pytest.raises(UnicodeEncodeError):
        frame.to_csv(f"{url}/t.csv", encoding="ascii")
    assert fs.cat_file(f"{home}/t.csv") == b"old"


def test_pyarrow(url: str, fs: FfsFileSystem, home: str) -> None:
    columns = pyarrow.table({"n": list(range(1000)), "part": [i % 4 for i in range(1000)]})
    pyarrow.dataset.write_dataset(
        columns, f"{home}/set", format="parquet", partitioning=["part"], filesystem=fs
    )
    found = pyarrow.dataset.dataset(f"{home}/set", partitioning=["part"], filesystem=fs)
    assert found.count_rows() == 1000
    assert sorted(found.to_table(columns=["n"]).column("n").to_pylist()) == list(range(1000))
    arrow = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fs))

    def broken() -> None:
        with pyarrow.parquet.ParquetWriter(f"{home}/p", columns.schema, filesystem=arrow) as out:
            out.write_table(columns)
            raise Broken

    with pytest.raises(Broken):
        broken()
    assert not fs.exists(f"{home}/p")


def test_upath(url: str, home: str, address: str) -> None:
    root = UPath(url)
    assert type(root) is FfsPath
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b").mkdir(exist_ok=True)
    with pytest.raises(FileExistsError):
        (root / "a").mkdir()
    path = root / "a" / "x.txt"
    assert path.write_text("één", encoding="utf-8") == 3
    assert path.read_text(encoding="utf-8") == "één"
    assert path.stat().st_size == 5
    assert sorted(p.name for p in (root / "a").iterdir()) == ["b", "x.txt"]
    assert [p.path for p in root.glob("**/*.txt")] == [f"{home}/a/x.txt"]
    moved = path.rename(root / "y.txt")
    assert (moved.path, moved.exists(), path.exists()) == (f"{home}/y.txt", True, False)
    link = root / "link"
    link.symlink_to("y.txt")
    assert link.readlink() == moved
    assert link.read_text(encoding="utf-8") == "één"
    moved.chmod(0o600)
    moved.unlink()
    assert not moved.exists()
    assert pickle.loads(pickle.dumps(root)) == root
    assert str(root) == f"ffs://{address}{home}"
    assert UPath("/x", protocol="ffs", address=address).parent.path == "/"


def test_numpy_and_zip_write_through_it(fs: FfsFileSystem, home: str) -> None:
    array = np.arange(100_000)
    with fs.open(f"{home}/a.npz", "wb") as file:
        np.savez(file, a=array)
    with fs.open(f"{home}/a.npz", "rb") as file:
        assert (np.load(file)["a"] == array).all()
    assert ffs.__name__ == "ffs"  # not shadowed by the module of the file system
