"""What `ffs doctor` and `ffs rdma devices` find: a sysfs of a made-up host, hosts without pyverbs, without
InfiniBand and without devices, and one finding for each thing that is wrong with a host."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ffs.cli import main
from ffs.cli.host import facts as facts_of_host
from ffs.cli.host import verbs as verbs_of_host
from ffs.cli.host.facts import Facts, NetFacts, PathFacts, chosen, gather, on_priorities
from ffs.cli.host.findings import BAD, NOTE, OK, WARN, judge, worst
from ffs.cli.host.rdma import Gid, Port, RdmaDevice, read_devices
from ffs.cli.host.verbs import Verbs, VerbsDevice, query
from ffs.cli.rdma import device_fields, device_lines

V4 = "::ffff:10.0.0.7"
GIDS = (Gid(0, "fe80::1", "IB/RoCE v1", "eth1"), Gid(3, V4, "RoCE v2", "eth1"))
PORT = Port(1, "ACTIVE", "LinkUp", "Ethernet", "100 Gb/sec (4X EDR)", GIDS, "eth1", 9000, ())
DEVICE = RdmaDevice(
    "mlx5_0", "22.31.1014", "1070:fd03:0012:3456", "MT_0359", 1, "/dev/infiniband/uverbs0", (PORT,)
)
VERBS = Verbs("ok", "1 devices", (VerbsDevice("mlx5_0", mtus=((1, 4096),), max_qp=1000),))
HEALTHY = Facts(
    kernel="6.12", native="", memlock=-1, ipc_lock=False, files=65536, io_uring="", io_uring_disabled=0,
    thp="madvise", thp_shmem="advise", huge_pages=64, huge_pages_free=60, shm_bytes=64 << 30,
    shm_free=60 << 30, congestion="bbr", congestion_available=("bbr", "cubic"), clock_synchronized=True,
    clock_source="tsc", numa_nodes=2, rdma=(DEVICE,), verbs=VERBS, uverbs_denied=(),
    networks=(NetFacts("eth1", (3,), (3,)),), paths=(PathFacts("/data", "", "directory"),),
)  # fmt: skip
DENIED = Verbs("ok", "1 devices", (VerbsDevice("mlx5_0", "denied"),))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="ascii")


def make_sysfs(root: Path) -> None:
    device = root / "class/infiniband/mlx5_0"
    write(device / "fw_ver", "22.31.1014")
    write(device / "node_guid", "1070:fd03:0012:3456")
    write(device / "board_id", "MT_0359")
    write(device / "device/numa_node", "1")
    write(root / "class/infiniband_verbs/uverbs0/ibdev", "mlx5_0")
    write(root / "class/infiniband_verbs/abi_version", "6")
    port = device / "ports/1"
    write(port / "state", "4: ACTIVE")
    write(port / "phys_state", "5: LinkUp")
    write(port / "link_layer", "Ethernet")
    write(port / "rate", "100 Gb/sec (4X EDR)")
    gids = {0: "fe80:0000:0000:0000:0000:0000:0000:0001", 3: "0000:0000:0000:0000:0000:ffff:0a00:0007"}
    for index in range(12):
        write(port / f"gids/{index}", gids.get(index, "0000:0000:0000:0000:0000:0000:0000:0000"))
    for index, kind in ((0, "IB/RoCE v1"), (3, "RoCE v2")):
        write(port / f"gid_attrs/types/{index}", kind)
        write(port / f"gid_attrs/ndevs/{index}", "eth1")
    write(port / "hw_counters/out_of_sequence", "0")
    write(port / "hw_counters/lifespan", "10")
    write(root / "class/net/eth1/mtu", "9000")


def test_devices_are_read_from_sysfs(tmp_path: Path) -> None:
    assert read_devices(tmp_path) == ()
    make_sysfs(tmp_path)
    assert read_devices(tmp_path) == (DEVICE,)
    counters = tmp_path / "class/infiniband/mlx5_0/ports/1/hw_counters"
    write(counters / "out_of_sequence", "17")
    (tmp_path / "class/infiniband/mlx5_0/fw_ver").unlink()
    (device,) = read_devices(tmp_path)
    assert (device.firmware, device.ports[0].losses) == ("", (("out_of_sequence", 17),))


@pytest.mark.parametrize(("netdev", "mtu"), [(9000, 4096), (4200, 4096), (4096, 2048), (1500, 1024), (0, 0)])
def test_the_mtu_that_an_interface_leaves(netdev: int, mtu: int) -> None:
    assert replace(PORT, netdev_mtu=netdev).mtu_by_netdev == mtu
    assert replace(PORT, netdev_mtu=netdev, link_layer="InfiniBand").mtu_by_netdev == 0


class FakePyverbs:
    """Modules pyverbs.device and pyverbs.pyverbs_error, as the real ones answer here."""

    def __init__(self, patch: pytest.MonkeyPatch, names: list[str] | None, broken: str = "") -> None:
        class PyverbsError(Exception):
            pass

        class PyverbsRDMAError(PyverbsError):
            pass

        class Named:
            def __init__(self, name: str) -> None:
                self.name = name.encode()

        class Context:
            def __init__(self, name: str) -> None:
                if name == broken:
                    raise PyverbsRDMAError(f"Failed to open device {name}. Errno: 13, Permission denied")

            def __enter__(self) -> Context:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def query_device(self) -> Any:
                return type("Attr", (), {"phys_port_cnt": 2, "max_qp": 10, "max_qp_wr": 20, "max_mr_size": 30,
                                         "max_qp_rd_atom": 16})  # fmt: skip

            def query_port(self, port: int) -> Any:
                return type("Attr", (), {"active_mtu": 3 if port == 1 else 5})

        def get_device_list() -> list[Named]:
            if names is None:
                raise PyverbsRDMAError("Failed to get devices list")
            return [Named(name) for name in names]

        device: Any = ModuleType("pyverbs.device")
        device.get_device_list, device.Context = get_device_list, Context
        errors: Any = ModuleType("pyverbs.pyverbs_error")
        errors.PyverbsError = PyverbsError
        package: Any = ModuleType("pyverbs")
        package.device = device
        for name, module in (("pyverbs", package), ("pyverbs.device", device)):
            patch.setitem(sys.modules, name, module)
        patch.setitem(sys.modules, "pyverbs.pyverbs_error", errors)


def test_a_host_without_infiniband_and_one_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    FakePyverbs(monkeypatch, None)
    said = query()
    assert (said.state, said.devices) == ("no InfiniBand", ())
    assert "Failed to get devices list" in said.reason
    FakePyverbs(monkeypatch, [])
    assert query() == Verbs("ok", "0 devices")


def test_verbs_of_two_devices_one_of_which_may_not_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    FakePyverbs(monkeypatch, ["rxe0", "rxe1"], broken="rxe1")
    first, second = query().devices
    assert first == VerbsDevice("rxe0", "", ((1, 1024), (2, 4096)), 10, 20, 30, 16)
    assert (second.name, second.mtus) == ("rxe1", ())
    assert "Permission denied" in second.error


def test_an_environment_without_pyverbs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(verbs_of_host, "DEBIAN", str(tmp_path))
    before = list(sys.path)
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    said = query()
    assert said.state == "no pyverbs"
    assert "python3-pyverbs" in said.reason
    assert sys.path == before


def test_a_healthy_host_has_nothing_but_ok() -> None:
    findings = judge(HEALTHY)
    assert {finding.level for finding in findings} == {OK}
    assert worst(findings) == OK
    subjects = "native, io_uring, o_direct, memlock, files, shared memory, huge pages, clock, tcp, rdma"
    assert {finding.subject for finding in findings} == set(subjects.split(", "))


def with_port(**changes: Any) -> Facts:
    return replace(HEALTHY, rdma=(replace(DEVICE, ports=(replace(PORT, **changes),)),))


@pytest.mark.parametrize(
    ("facts", "level", "subject", "text", "way_out"),
    [
        (replace(HEALTHY, native="no such file"), BAD, "native", "no such file", ""),
        (replace(HEALTHY, io_uring="refused", io_uring_disabled=2), WARN, "io_uring", "pread", "sysctl"),
        (replace(HEALTHY, io_uring="refused"), WARN, "io_uring", "refused", "seccomp"),
        (replace(HEALTHY, paths=(PathFacts("/x", "no O_DIRECT", "file"),)), BAD, "o_direct", "/x", "XFS"),
        (replace(HEALTHY, memlock=8 << 20), WARN, "memlock", "8.0 MiB", "LimitMEMLOCK"),
        (replace(HEALTHY, files=1024), WARN, "files", "1024", "LimitNOFILE"),
        (replace(HEALTHY, shm_bytes=0, shm_free=0), WARN, "shared memory", "no /dev/shm", "mount"),
        (replace(HEALTHY, shm_free=64 << 20), WARN, "shared memory", "64.0 MiB free", "remount"),
        (replace(HEALTHY, thp_shmem="never"), NOTE, "huge pages", "shared memory", "shmem_enabled"),
        (replace(HEALTHY, thp="never"), WARN, "huge pages", "are off", "madvise"),
        (replace(HEALTHY, clock_synchronized=False), WARN, "clock", "isn't synchronized", "chrony"),
        (replace(HEALTHY, clock_synchronized=None), NOTE, "clock", "can't be told", ""),
        (replace(HEALTHY, clock_source="hpet"), WARN, "clock", "hpet", "TSC"),
        (replace(HEALTHY, congestion_available=("reno",)), NOTE, "tcp", "reno", "tcp_cubic"),
        (replace(HEALTHY, rdma=()), NOTE, "rdma", "no devices", ""),
        (replace(HEALTHY, verbs=Verbs("no pyverbs", "install it")), NOTE, "rdma", "install it", ""),
        (replace(HEALTHY, verbs=Verbs("ok", "")), WARN, "rdma", "no provider", "ibverbs-providers"),
        (replace(HEALTHY, verbs=DENIED), WARN, "rdma", "denied", ""),
        (replace(HEALTHY, uverbs_denied=("/dev/u0",)), WARN, "rdma", "/dev/u0", "udev"),
        (replace(HEALTHY, rdma=(replace(DEVICE, uverbs=""),)), WARN, "rdma", "programs", "ib_uverbs"),
        (replace(HEALTHY, rdma=(replace(DEVICE, numa=-1),)), NOTE, "rdma", "NUMA", ""),
        (with_port(state="DOWN"), WARN, "rdma", "is DOWN", "eth1 up"),
        (with_port(gids=GIDS[:1]), WARN, "rdma", "no RoCE v2 GID", "ip address"),
        (with_port(losses=(("out_of_sequence", 9),)), WARN, "rdma", "out_of_sequence 9", "PFC"),
        (replace(HEALTHY, networks=(NetFacts("eth1", None, None),)), NOTE, "rdma", "doesn't say", ""),
        (replace(HEALTHY, networks=(NetFacts("eth1", (), None),)), WARN, "rdma", "no priority", "dcb pfc"),
        (replace(HEALTHY, networks=(NetFacts("eth1", (3,), ()),)), WARN, "rdma", "(ECN)", "roce_np"),
    ],
)  # fmt: skip
def test_each_thing_that_is_wrong_is_one_finding(
    facts: Facts, level: str, subject: str, text: str, way_out: str
) -> None:
    (finding,) = [finding for finding in judge(facts) if finding.level != OK]
    assert (finding.level, finding.subject) == (level, subject)
    assert text in finding.text
    assert way_out in finding.way_out
    assert bool(way_out) == bool(finding.way_out)


def test_what_passes_the_limit_of_locked_memory() -> None:
    assert worst(judge(replace(HEALTHY, memlock=8 << 20, ipc_lock=True))) == OK
    assert worst(judge(replace(HEALTHY, memlock=2 << 30, rdma=()))) == NOTE  # that it has no RDMA
    (finding,) = [f for f in judge(replace(HEALTHY, memlock=2 << 30)) if f.level != OK]
    assert "RDMA registers every buffer" in finding.text


def test_small_packets_by_verbs_or_by_the_interface() -> None:
    small = Verbs("ok", "", (VerbsDevice("mlx5_0", mtus=((1, 1024),)),))
    for facts in (replace(HEALTHY, verbs=small), replace(with_port(netdev_mtu=1500), verbs=Verbs("ok", "", (
        VerbsDevice("mlx5_0"),)))):  # fmt: skip
        (finding,) = [f for f in judge(facts) if f.level != OK]
        assert "packets of 1024 bytes" in finding.text


def test_words_of_the_kernel() -> None:
    assert chosen("always [madvise] never") == "madvise"
    assert chosen("") == ""
    assert on_priorities({"prio-pfc": {"0": "off", "3": "on"}}) == (3,)
    assert on_priorities({"prio-pfc": [[0, False], [4, True]]}) == (4,)
    assert on_priorities([]) == ()


def test_lines_and_fields_of_devices() -> None:
    said = "\n".join(device_lines((DEVICE,), VERBS))
    assert "mlx5_0: MT_0359, firmware 22.31.1014, NUMA node 1" in said
    assert "port 1: ACTIVE, Ethernet 100 Gb/sec (4X EDR), MTU 4096 on eth1 (MTU 9000)" in said
    assert f"gid 3: {V4} (RoCE v2)" in said
    without = "\n".join(device_lines((DEVICE,), Verbs("no pyverbs", "install it")))
    assert "MTU 4096 by the interface's" in without
    assert "(install it)" in without
    assert "verbs don't list it" in "\n".join(device_lines((DEVICE,), Verbs("ok", "")))
    assert device_lines((), Verbs("no InfiniBand", "none"))[0].startswith("no RDMA devices")
    fields: Any = device_fields((DEVICE,), VERBS)
    (port,) = fields["devices"][0]["ports"]
    assert (port["mtu"], port["mtu_by_netdev"], port["gids"][1]["gid"]) == (4096, 4096, V4)
    fields = device_fields((DEVICE,), Verbs("no pyverbs", ""))
    assert fields["devices"][0]["ports"][0]["mtu"] is None


def test_the_commands_on_this_host(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["rdma", "devices", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [device["name"] for device in listed["devices"]] == [device.name for device in read_devices()]
    assert main(["rdma", "devices"]) == 0
    assert capsys.readouterr().out
    missing = str(tmp_path / "missing")
    assert main(["doctor", "--json", missing]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["worst"] == "bad"
    assert [f["text"] for f in said["findings"] if f["level"] == "bad" and f["subject"] == "o_direct"] == [
        f"{missing}: No such file or directory"
    ]
    assert list(tmp_path.iterdir()) == []
    assert main(["doctor"]) in (0, 1)
    assert "io_uring" in capsys.readouterr().out


def test_the_facts_of_this_host_are_those_of_its_own_tools(tmp_path: Path) -> None:
    facts = gather((str(tmp_path),))
    assert facts.native == ""
    assert facts.thp in ("", "always", "madvise", "never")
    assert facts.congestion in facts.congestion_available
    assert facts.numa_nodes >= 1
    (place,) = facts.paths
    assert (place.path, place.kind) == (str(tmp_path), "directory")
    assert facts_of_host._limit(7) == facts.files  # RLIMIT_NOFILE
