"""storage_server.devices on files: what may be formatted is judged before anything is made."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("ffs._native._ffs", reason="the native library isn't built")

from ffs._native.device import device_format
from ffs.errors import Exists, NoSpace, NotFound, WrongCluster
from storage_server.config import DeviceChoice
from storage_server.devices import prepare, survey

CLUSTER = bytes(range(16))
SIZE = 256 << 20


def blank(path: Path, size: int = SIZE) -> str:
    with path.open("wb") as file:
        file.truncate(size)
    return str(path)


def test_a_size_that_is_too_small_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(NoSpace, match="too small: 1048576 bytes"):
        survey([DeviceChoice(f"{tmp_path}/new", 1 << 20)], CLUSTER, format_if_new=False)
    with pytest.raises(NoSpace, match="too small: 130 bytes"):
        survey([DeviceChoice(blank(tmp_path / "tiny", 130), 0)], CLUSTER, format_if_new=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]


def test_what_a_file_holds_is_named_with_a_way_out_that_works(tmp_path: Path) -> None:
    path = blank(tmp_path / "theirs")
    with open(path, "r+b") as file:
        file.seek(512)
        file.write(b"EFI PART")
    for format_if_new in (False, True):
        with pytest.raises(Exists, match=f"it holds a GPT partition table.*rm {path}") as raised:
            survey([DeviceChoice(path, 0)], CLUSTER, format_if_new=format_if_new)
        assert "--force" not in raised.value.message


def test_what_is_blank_is_formatted_only_when_that_is_asked_for(tmp_path: Path) -> None:
    choice = DeviceChoice(blank(tmp_path / "blank"), 0)
    with pytest.raises(NotFound, match="it is blank: --format-if-new"):
        survey([choice], CLUSTER, format_if_new=False)
    for found in (choice, DeviceChoice(f"{tmp_path}/new", SIZE)):
        (plan,) = survey([found], CLUSTER, format_if_new=True)
        assert (plan.found, plan.make) == (None, found is not choice)
    assert [entry.name for entry in tmp_path.iterdir()] == ["blank"]
    assert Path(choice.path).read_bytes().count(0) == SIZE


def test_a_device_of_ours_is_used_as_it_is(tmp_path: Path) -> None:
    path = blank(tmp_path / "ours")
    device_format(path, cluster=CLUSTER, targets=[7, 9], max_chunks=200)
    before = Path(path).read_bytes()
    (plan,) = survey([DeviceChoice(path, 0, role="kv")], CLUSTER, format_if_new=False)
    assert plan.found is not None
    assert (plan.found.targets, plan.found.role, plan.found.size_bytes) == ((7, 9), "kv", SIZE)
    assert Path(path).read_bytes() == before
    with pytest.raises(WrongCluster):
        survey([DeviceChoice(path, 0)], bytes(16), format_if_new=False)


def test_a_null_device_is_told_as_one_when_it_is_made_and_when_it_is_found(tmp_path: Path) -> None:
    async def allocate(uuid: bytes, count: int) -> tuple[int, ...]:
        return tuple(range(1, count + 1))

    choices = [DeviceChoice(f"{tmp_path}/n", SIZE, data="null"), DeviceChoice(f"{tmp_path}/k", SIZE)]
    plans = survey(choices, CLUSTER, format_if_new=True)
    made = asyncio.run(prepare(plans, CLUSTER, 2, allocate))
    assert [device.null_data for device in made] == [True, False]
    found = [plan.found for plan in survey(choices, CLUSTER, format_if_new=False)]
    assert found == made
