"""Software RDMA (rxe): what `ffs` says of it, that it moves data, and the native tests of the transport."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from guest_mapper import run

from ffs.cli import main
from ffs.cli.host.rdma import read_devices
from ffs.cli.host.verbs import query

ROOT = Path(__file__).resolve().parents[2]
MODPROBE = Path("/proc/sys/kernel/modprobe")
ADDRESS = "::ffff:10.99.0.1"
# native/test/<folder>_rdma*.cc are cases of the program test_<folder>.
PROGRAMS = sorted({path.name.partition("_")[0] for path in (ROOT / "native/test").glob("*_rdma*.cc")})


def test_sysfs_and_verbs_tell_of_the_same_device(capsys: pytest.CaptureFixture[str]) -> None:
    verbs = query()
    assert verbs.state == "ok", verbs.reason
    (seen,) = verbs.devices
    assert (seen.name, seen.error, seen.mtu(1)) == ("rxe0", "", 4096)
    assert seen.max_qp > 0
    assert main(["rdma", "devices", "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert (device["name"], device["uverbs"]) == ("rxe0", "/dev/infiniband/uverbs0")
    (port,) = device["ports"]
    assert (port["state"], port["link_layer"], port["netdev"]) == ("ACTIVE", "Ethernet", "dummy0")
    assert (port["mtu"], port["mtu_by_netdev"]) == (4096, 4096)
    assert (1, ADDRESS, "RoCE v2") in [(gid["index"], gid["gid"], gid["kind"]) for gid in port["gids"]]


def test_the_doctor_sees_the_port_go_down_and_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    def said() -> list[tuple[str, str]]:
        assert main(["doctor", "--json"]) == 0
        findings = json.loads(capsys.readouterr().out)["findings"]
        return [(each["level"], each["text"]) for each in findings if each["subject"] == "rdma"]

    assert any(level == "ok" and text.startswith("rxe0 port 1: active") for level, text in said())
    run("ip", "link", "set", "dummy0", "down")
    try:
        assert ("warn", "rxe0 port 1 is DOWN") in said()
    finally:
        run("ip", "link", "set", "dummy0", "up")
    assert any(level == "ok" and text.startswith("rxe0 port 1: active") for level, text in said())


def fresh(*words: str) -> str:
    """In a process of its own: libibverbs remembers what it once found. A child of fork, since this process
    hasn't asked it for anything yet and a new one takes long to start."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                status = main(list(words))
            os.write(writer, said.getvalue().encode())
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, text
    return text


@pytest.mark.takes_devices_away
def test_a_kernel_without_infiniband_and_one_without_devices() -> None:
    helper = MODPROBE.read_text()
    run("rdma", "link", "delete", "rxe0")
    try:
        assert read_devices() == ()
        said = json.loads(fresh("rdma", "devices", "--json"))
        assert (said["verbs"], said["devices"]) == ("ok", [])
        MODPROBE.write_text("\n")  # or who asks for devices gets the modules loaded again
        run("modprobe", "-r", "rdma_rxe", "rdma_ucm", "rdma_cm", "iw_cm", "ib_cm", "ib_uverbs", "ib_core")
        assert not Path("/sys/class/infiniband").exists()
        assert json.loads(fresh("rdma", "devices", "--json"))["verbs"] == "no InfiniBand"
    finally:
        MODPROBE.write_text(helper)
        run("modprobe", "-a", "ib_uverbs", "rdma_rxe", "rdma_ucm")
        run("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "dummy0")
    assert [device.name for device in read_devices()] == ["rxe0"]


def test_a_queue_pair_moves_data_to_another() -> None:
    line = ["ibv_rc_pingpong", "-d", "rxe0", "-g", "1", "-s", "65536", "-n", "20", "-c"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        while "18515" not in run("ss", "-Hltn"):
            assert server.poll() is None
        said = run(*line, "127.0.0.1")
        assert server.wait(60) == 0
    assert "20 iters" in said, said


@pytest.mark.parametrize("folder", PROGRAMS)
def test_the_native_tests_of_the_transport(folder: str) -> None:
    program = ROOT / "build/test" / f"test_{folder}"
    done = subprocess.run(
        [program, "-sf=*_rdma*"], cwd="/scratch", capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.search(r"test cases: +(\d+) \|", done.stdout)
    assert ran, done.stdout
    assert int(ran[1]) > 0
