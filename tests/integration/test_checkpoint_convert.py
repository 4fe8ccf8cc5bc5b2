"""`ffs ckpt convert`: into every format and back, by what DCP, safetensors and torch themselves read."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from torch.distributed import checkpoint as dcp

from ffs import checkpoint, errors
from ffs.checkpoint import convert as converting
from ffs.checkpoint.convert import Place, convert
from ffs.checkpoint.dcp import FfsStorageWriter
from ffs.client.client import Client

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:.*TypedStorage is deprecated"
)


def some_state() -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.randn(300, 70)
    return {
        "model": {"w": weight, "tied": weight, "turned": torch.randn(4, 6).T, "e": torch.empty(0, 3)},
        "half": torch.randn(9).bfloat16(),
        "scalar": torch.tensor(3.5),
        "list": [torch.arange(5), {"lr": 0.1}],
        "step": 12,
    }


def same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            same(value, other[key])
    elif isinstance(one, list):
        for value, theirs in zip(one, other, strict=True):
            same(value, theirs)
    else:
        assert one == other


def test_every_format_and_back(run: Run, client: Client, home: str, tmp_path: Path) -> None:
    """A torch file here -> ffs -> DCP here -> DCP in the cluster -> safetensors here -> ffs -> torch there ->
    ffs, each read by its own library on the way."""
    from safetensors.torch import load_file

    state = some_state()
    torch.save(state, tmp_path / "one.pt")

    def ffs(*words: str) -> None:
        status, out, error = run("ckpt", "convert", *words)
        assert (status, out) == (0, ""), error

    ffs(str(tmp_path / "one.pt"), f"ffs:{home}/native")
    loaded = checkpoint.load(client, f"{home}/native")
    same(state, loaded)
    assert loaded["model"]["w"] is loaded["model"]["tied"]
    assert run("ckpt", "verify", f"{home}/native")[0] == 0

    ffs("--to", "dcp", f"ffs:{home}/native", str(tmp_path / "dcp"))
    assert sorted(os.listdir(tmp_path / "dcp")) == [".metadata", "__0_0.distcp"]
    into = some_state()
    into["model"]["w"] = torch.zeros(300, 70)
    into["step"] = 0
    dcp.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    same(state, into)

    ffs(str(tmp_path / "dcp"), "--to", "dcp", f"ffs:{home}/dcp")
    into = some_state()
    into["model"]["w"] = torch.zeros(300, 70)
    dcp.load(into, checkpoint_id=f"ffs://{client.address}{home}/dcp", no_dist=True)
    same(state, into)

    ffs(f"ffs:{home}/dcp", str(tmp_path / "all.safetensors"))
    plain = load_file(tmp_path / "all.safetensors")
    assert torch.equal(plain["model.w"], state["model"]["w"])
    assert torch.equal(plain["list.0"], state["list"][0])

    ffs(str(tmp_path / "all.safetensors"), f"ffs:{home}/again")
    same(state, checkpoint.load(client, f"{home}/again"))

    ffs(f"ffs:{home}/again", f"ffs:{home}/there.pt")
    ffs(f"ffs:{home}/there.pt", f"ffs:{home}/last")
    same(state, checkpoint.load(client, f"{home}/last"))
    client_names = sorted(client.listdir(home))
    assert client_names == ["again", "dcp", "last", "native", "there.pt"]


def test_what_dcp_wrote_by_our_writer_and_what_others_wrote(
    client: Client, home: str, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    state = some_state()
    dcp.save(state, storage_writer=FfsStorageWriter(client, f"{home}/c"), no_dist=True)
    convert(Place(f"{home}/c", client), Place(str(tmp_path / "c.pt")))
    same(state, torch.load(tmp_path / "c.pt", weights_only=True))
    save_file({"b": torch.ones(3), "a": torch.zeros(2, 2)}, tmp_path / "theirs.safetensors")
    convert(Place(str(tmp_path / "theirs.safetensors")), Place(f"{home}/theirs", client))
    same({"a": torch.zeros(2, 2), "b": torch.ones(3)}, checkpoint.load(client, f"{home}/theirs"))
    (tmp_path / "copied").mkdir()
    for name in client.listdir(f"{home}/theirs"):  # a checkpoint that was copied to here
        with client.open(f"{home}/theirs/{name}", "rb") as file:
            (tmp_path / "copied" / name).write_bytes(file.read())
    convert(Place(str(tmp_path / "copied")), Place(str(tmp_path / "back.safetensors")))
    with converting.opened(Place(str(tmp_path / "back.safetensors")), False) as source:
        assert source.read("b").tolist() == [1, 1, 1]


def test_a_large_state_is_never_whole_in_memory(
    client: Client, home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors are read when they are written, each once."""
    state = {f"t{n}": torch.full((1 << 18,), float(n)) for n in range(8)}
    torch.save(state, tmp_path / "s.pt")
    seen: list[str] = []
    live: list[str] = []
    original = converting.TorchSource.read

    def read(self: Any, name: str) -> torch.Tensor:
        import weakref

        tensor = original(self, name).clone()
        seen.append(name)
        live.append(name)
        weakref.finalize(tensor, live.remove, name)
        assert len(live) <= 3, live
        return tensor

    monkeypatch.setattr(converting.TorchSource, "read", read)
    for to, goal in (
        ("ffs", Place(f"{home}/c", client)),
        ("dcp", Place(str(tmp_path / "dcp"))),
        ("safetensors", Place(str(tmp_path / "c.safetensors"))),
    ):
        seen.clear()
        counted: list[int] = []
        convert(Place(str(tmp_path / "s.pt")), goal, to, progress=counted.append)  # type: ignore[arg-type]
        assert sorted(seen) == sorted(state)
        assert sum(counted) == 8 << 20


class Surprise:
    def __reduce__(self) -> Any:
        return (exec, ("import os; os.environ['FFS_TEST_SURPRISE'] = 'ran'",))


def test_pickles_run_nothing_unless_trusted(run: Run, client: Client, home: str, tmp_path: Path) -> None:
    """C14."""
    torch.save({"x": Surprise()}, tmp_path / "bad.pt")
    dcp.save({"x": Surprise(), "t": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "worse").mkdir()
    (tmp_path / "worse" / ".metadata").write_bytes(pickle.dumps(Surprise()))
    os.environ.pop("FFS_TEST_SURPRISE", None)
    for name in ("bad.pt", "dcp", "worse"):
        status, _, error = run("ckpt", "convert", str(tmp_path / name), f"ffs:{home}/c")
        assert status == 1
        assert "--trusted" in error
        assert "FFS_TEST_SURPRISE" not in os.environ
    assert client.listdir(home) == []
    run("ckpt", "convert", "--trusted", str(tmp_path / "bad.pt"), f"ffs:{home}/c")
    assert os.environ.pop("FFS_TEST_SURPRISE") == "ran"


def test_what_fails_leaves_nothing_and_replaces_nothing(
    run: Run, client: Client, home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.ones(5), "b": torch.ones(6)}, tmp_path / "s.pt")
    goals = [f"ffs:{home}/c", str(tmp_path / "g.pt"), f"ffs:{home}/c.safetensors", str(tmp_path / "d")]

    def to(goal: str) -> list[str]:
        return ["--to", "dcp", goal] if goal.endswith("/d") else [goal]

    original = converting.TorchSource.read

    def read(self: Any, name: str) -> torch.Tensor:
        if name == "b":
            raise OSError(5, "the disk failed")
        return original(self, name)

    monkeypatch.setattr(converting.TorchSource, "read", read)
    for goal in goals:
        assert run("ckpt", "convert", str(tmp_path / "s.pt"), *to(goal))[0] == 1, goal
    assert client.listdir(home) == []
    assert os.listdir(tmp_path) == ["s.pt"]
    monkeypatch.undo()
    monkeypatch.setenv("FFS_CLUSTER", client.address)
    for goal in goals:
        assert run("ckpt", "convert", str(tmp_path / "s.pt"), *to(goal))[0] == 0, goal
        status, _, error = run("ckpt", "convert", str(tmp_path / "s.pt"), *to(goal))
        assert (status, "is there already" in error) == (1, True)


KILLED = """
import os, signal, sys
import torch
import ffs
from ffs.checkpoint import convert as converting
from ffs.checkpoint.convert import Place, convert

address, source, goal, to = sys.argv[1:]
original = converting.TorchSource.read

def read(self, name):
    if name == "b":
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, name)

client = ffs.connect(address, session_ttl=1.0)
converting.TorchSource.read = read
in_store = goal.startswith("ffs:")
for kind in to.split(","):  # in a child each: torch is imported once
    if not os.fork():
        convert(Place(source), Place(goal.removeprefix("ffs:") + kind, client if in_store else None), kind)
    _, status = os.wait()
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, status
"""


def test_what_a_killed_conversion_leaves_is_taken_away_by_the_next(
    run: Run, client: Client, home: str, address: str, tmp_path: Path
) -> None:
    """In every format, here and in the cluster, and it is never taken for a checkpoint."""
    torch.save({"a": torch.ones(5), "b": torch.ones(6)}, tmp_path / "s.pt")
    here = tmp_path / "here"
    here.mkdir()
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    for goal, kinds in ((f"ffs:{home}/", "safetensors,ffs,dcp"), (f"{here}/", "dcp,safetensors")):
        subprocess.run(
            [sys.executable, str(script), address, str(tmp_path / "s.pt"), goal, kinds],
            check=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
    assert [name[:8] for name in os.listdir(here)] == [".safeten"]  # which has taken the first one's away
    there = {name[:5] for name in client.listdir(home)}  # a file without a name leaves nothing at all
    assert {".dcp."} <= there <= {".dcp.", ".ffs."}
    assert run("ckpt", "ls", home)[1].splitlines()[1:] == []
    end = time.monotonic() + 30
    while client.listdir(home):  # until their sessions are over
        assert time.monotonic() < end, client.listdir(home)
        status, said, error = run("ckpt", "gc", home)
        assert (status, error) == (0, "")
        time.sleep(0.1)
    assert "removed" in said
    convert(Place(str(tmp_path / "s.pt")), Place(str(here / "c.safetensors")))
    assert os.listdir(here) == ["c.safetensors"]


def test_a_conversion_that_goes_on_isnt_taken_for_remains(
    client: Client, home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.ones(5)}, tmp_path / "s.pt")
    places = [
        Place(str(tmp_path / "there" / "c"), None),
        Place(str(tmp_path / "there" / "d"), None),
        Place(f"{home}/c", client),
        Place(f"{home}/d", client),
    ]
    original = converting.TorchSource.read
    nested = False

    def read(self: Any, name: str) -> torch.Tensor:
        nonlocal nested
        if not nested:
            nested = True
            convert(Place(str(tmp_path / "s.pt")), inner, "dcp")
        return original(self, name)

    for outer, inner in (places[:2], places[2:]):  # noqa: B007 - `read` converts to it
        nested = False
        with monkeypatch.context() as patched:
            patched.setattr(converting.TorchSource, "read", read)
            convert(Place(str(tmp_path / "s.pt")), outer, "dcp")
    assert sorted(os.listdir(tmp_path / "there")) == ["c", "d"]
    assert sorted(client.listdir(home)) == ["c", "d"]


@pytest.mark.parametrize("data", [b"", b"\x02", b"\xff" * 40, (2).to_bytes(8, "little") + b"[]"])
def test_what_is_no_safetensors_file(data: bytes, tmp_path: Path, client: Client, home: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(errors.Damaged):
        convert(Place(str(tmp_path / "x.safetensors")), Place(f"{home}/c", client))


def test_numpy_arrays_of_a_trusted_file(client: Client, home: str, tmp_path: Path) -> None:
    torch.save({"a": np.arange(4, dtype=np.float32)}, tmp_path / "n.pt")
    convert(Place(str(tmp_path / "n.pt")), Place(f"{home}/c", client), trusted=True)
    assert checkpoint.load(client, f"{home}/c")["a"].tolist() == [0, 1, 2, 3]
