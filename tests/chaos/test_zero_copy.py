"""Replies to another host are sent without a copy, until the kernel says that it copies them all the same: as
between network namespaces of one host (docs/architecture.md, Sending without a copy)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chaos_cluster import Cluster
from chaos_hosts import Hosts, hosts

import ffs
from ffs.rpc.secret_file import SECRET_VARIABLE

SIZE = 32 << 20
PEEK = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=10).read().decode())"


def test_what_the_kernel_copies_is_sent_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hosts(["meta0", "node0"]) as places:
        cluster = Cluster(tmp_path, places, nodes=1, metas=1)
        try:
            cluster.form(replicas=1, chains_per_device=2)
            monkeypatch.setenv(SECRET_VARIABLE, str(cluster.secret_file))
            read_it_all(cluster.address)
            sends, copied, lent = counted(places, cluster)
        finally:
            cluster.close()
        if lent:
            pytest.skip("the device lies in memory: its reads are sent out of that")
        assert sends == copied
        assert (4 <= sends <= 64) if places.can_cut else sends == 0  # a few, until it was seen


def read_it_all(address: str) -> None:
    data = os.urandom(SIZE)
    with ffs.connect(address, request_timeout=60, transport="tcp") as client:
        with client.open("/file", "wb") as file:
            file.write(data)
        for _ in range(4):
            with client.open("/file", "rb") as file:
                assert file.read() == data


def counted(places: Hosts, cluster: Cluster) -> list[int]:
    """Sends without a copy, those of them that were copied after all, reads sent out of the device."""
    url = cluster.processes["node0"].ready()["metrics"]
    command = [*places.command("node0"), sys.executable, "-c", PEEK, f"http://{url}/metrics"]
    page = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    names = ("zero_copy_sends", "zero_copy_copied", "memory_reads")
    found = [re.search(rf"^ffs_{name}_total\{{.*\}} ([0-9.e+]+)$", page, re.M) for name in names]
    return [int(float(one[1])) for one in found if one is not None]
