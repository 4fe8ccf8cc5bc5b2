"""storage_server.config and identity: sizes, devices, the node's directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ffs.errors import Busy, Damaged, InvalidArgument, WrongCluster
from storage_server.config import DeviceChoice, parse_config, parse_device, parse_size
from storage_server.identity import SOCKET_PATH_MAX, open_identity, socket_directory

CLUSTER = b"c" * 16
BASE = ["--metadata=a:1", "--dir=/d", "--device=/dev/x"]


def test_sizes() -> None:
    assert [parse_size(text) for text in ("0", "123", "4K", "2m", "3G", "1TiB", "5GB")] == [
        0,
        123,
        4 << 10,
        2 << 20,
        3 << 30,
        1 << 40,
        5 << 30,
    ]
    for bad in ("", "G", "1.5G", "-1", "1X", "\uff11"):
        with pytest.raises(InvalidArgument, match="give bytes"):
            parse_size(bad)


def test_devices() -> None:
    assert parse_device("/dev/nvme0n1", 0) == DeviceChoice("/dev/nvme0n1", 0)
    assert parse_device("/a/b:4G", 1) == DeviceChoice("/a/b", 4 << 30)
    assert parse_device("/a:1/b", 7) == DeviceChoice("/a:1/b", 7)
    assert parse_device("/dev/disk/by-path/pci-0000:01:00.0-nvme", 7).size_bytes == 7


def test_device_options() -> None:
    path = "/dev/x"
    assert parse_device("/a/b:4G,write-cache=protected,role=kv", 1) == DeviceChoice(
        "/a/b", 4 << 30, write_cache="protected", role="kv"
    )
    assert parse_device(f"{path},discard=off", 7) == DeviceChoice(path, 7, discard="off")
    assert parse_device("uuid:0123:4,role=bulk", 0) == DeviceChoice("uuid:0123:4", 0, role="bulk")
    for bad, why in (
        (",write-cache=maybe", "auto, volatile, protected"),
        (",role=", "kv, bulk"),
        (",speed=9", "isn't an option"),
        (",role=kv,role=bulk", "given twice"),
        (",", "isn't an option"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            parse_device(path + bad, 0)
    config = parse_config([*BASE, "--device=/dev/y,role=kv", "--device-size=1G"])
    assert config.devices[1] == DeviceChoice("/dev/y", 1 << 30, role="kv")


def test_null_devices_are_asked_for_twice() -> None:
    null = "--device=/n:1G,data=null"
    with pytest.raises(InvalidArgument, match=r"--allow-null-devices.*/n"):
        parse_config([*BASE, null])
    assert parse_config([*BASE, null, "--allow-null-devices"]).devices[1].data == "null"
    assert parse_config([*BASE, "--allow-null-devices"]).devices[0].data == "keep"


def test_an_existing_path_with_a_comma_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "disk,role=kv"
    path.touch()
    assert parse_device(str(path), 3) == DeviceChoice(str(path), 3)


def test_configuration() -> None:
    config = parse_config([*BASE, "--device=/y:1G", "--device-size=2G", "--listen=[::1]:9"])
    assert config.devices == (DeviceChoice("/dev/x", 2 << 30), DeviceChoice("/y", 1 << 30))
    assert config.listen == ("::1", 9)
    assert parse_config(BASE).listen == ("127.0.0.1", 0)
    assert parse_config([*BASE, "--listen=10.0.0.1:5"]).listen == ("10.0.0.1", 5)
    plain = parse_config(BASE)
    assert (plain.domain, plain.scrub_bytes_per_s, plain.sync_share_percent) == ("", 4 << 20, 25)
    assert plain.dedup_bytes_per_s == 64 << 20
    assert parse_config([*BASE, "--dedup-rate=0"]).dedup_bytes_per_s == 0
    given = parse_config([*BASE, "--domain=rack 1", "--scrub-rate=0", "--sync-share=50"])
    assert (given.domain, given.scrub_bytes_per_s, given.sync_share_percent) == ("rack 1", 0, 50)
    for bad in ("--domain=a\nb", "--domain=" + "x" * 101, "--sync-share=0", "--sync-share=101"):
        with pytest.raises(InvalidArgument, match="give"):
            parse_config([*BASE, bad])
    with pytest.raises(InvalidArgument, match="named twice"):
        parse_config([*BASE, "--device=/dev/x:1G"])
    with pytest.raises(InvalidArgument, match="1 to 64"):
        parse_config([*BASE, "--targets-per-device=65"])


def test_identity_is_drawn_once(tmp_path: Path) -> None:
    directory = str(tmp_path / "node")
    first = open_identity(directory, CLUSTER)
    with pytest.raises(Busy, match="already runs"):
        open_identity(directory, CLUSTER)
    first.release()
    again = open_identity(directory, CLUSTER)
    assert again.uuid == first.uuid
    again.release()
    again.release()
    with pytest.raises(WrongCluster, match=CLUSTER.hex()):
        open_identity(directory, b"d" * 16)
    open_identity(directory, CLUSTER).release()  # a refusal leaves no lock behind


def test_a_damaged_identity_is_named(tmp_path: Path) -> None:
    for content in ("", "{}", '{"uuid": 1, "cluster": ""}', "[]"):
        (tmp_path / "node.json").write_text(content)
        with pytest.raises(Damaged, match=r"node\.json"):
            open_identity(str(tmp_path), CLUSTER)
    (tmp_path / "node.json").write_text(json.dumps({"uuid": "00" * 16, "cluster": CLUSTER.hex()}))
    open_identity(str(tmp_path), CLUSTER).release()


def test_socket_paths_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    short = open_identity(str(tmp_path / "n"), CLUSTER)
    long = open_identity(str(tmp_path / ("l" * 100)), CLUSTER)
    below = socket_directory("", short)
    if len(os.fsencode(str(tmp_path))) < 60:
        assert below == str(tmp_path / "n" / "sockets")
    elsewhere = socket_directory("", long)
    assert elsewhere.startswith(str(tmp_path / "run"))
    assert len(elsewhere) < SOCKET_PATH_MAX or len(str(tmp_path)) > 60
    assert os.stat(elsewhere).st_mode & 0o777 == 0o700
    assert socket_directory(str(tmp_path / "wanted"), long) == str(tmp_path / "wanted")
    short.release()
    long.release()


def test_sending_without_a_copy_is_chosen_by_name(tmp_path: Path) -> None:
    words = ["--metadata=h:1", f"--dir={tmp_path}", "--device=/dev/x:1G"]
    assert parse_config(words).zero_copy_send == "auto"
    assert parse_config([*words, "--zero-copy-send=off"]).zero_copy_send == "off"
    with pytest.raises(SystemExit):
        parse_config([*words, "--zero-copy-send=maybe"])
