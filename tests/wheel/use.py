"""Run by run.sh with the wheel installed and no sources near: a cluster, a file, a KV block, down again."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import ffs

here = Path(ffs.__file__).resolve()
assert Path(sys.prefix).resolve() in here.parents, f"ffs was imported from {here}, not from the wheel"
command = [str(Path(sys.executable).parent / "ffs")]
with tempfile.TemporaryDirectory() as directory:
    up = subprocess.run(
        [*command, "up", "--dir", directory, "--device-size", "1GiB", "--detach", "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    address = json.loads(up.stdout)["address"]
    try:
        client = ffs.connect(address)
        payload = os.urandom(3 * 2**20 + 17)
        with ffs.open("/hello", "wb", client=client) as file:
            file.write(payload)
        with ffs.open("/hello", "rb", client=client) as file:
            assert file.read() == payload
        client.close()
    finally:
        subprocess.run([*command, "down", "--dir", directory], check=True, capture_output=True)
print("wheel: 1 passed, 0 failed")
