"""Instructions of an operation in the client and in the server, over one transport (docs/rdma.md).

    python tests/guest/instructions.py PROGRAM TRANSPORT [KIND...]     (PROGRAM: build/test/test_transport)
    tests/guest/run.sh -- python3 tests/guest/instructions.py build/test/test_transport rdma

KIND: "read 4096 16 20" is what, bytes, how many at once, how many times.
Wants valgrind, and a C compiler: valgrind 3.19 doesn't know epoll_pwait2, so the program gets one that calls
epoll_pwait. What is counted is the program's own code in user mode, with the I/O of threads (pread): the
kernel's, and a device's, isn't.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SHIM = """
#define _GNU_SOURCE
#include <sys/epoll.h>
#include <time.h>
int epoll_pwait2(int fd, struct epoll_event *events, int most, const struct timespec *wait,
                 const sigset_t *mask) {
  int ms = wait ? wait->tv_sec * 1000 + (wait->tv_nsec + 999999) / 1000000 : -1;
  return epoll_pwait(fd, events, most, ms, mask);
}
"""
THREAD = re.compile(r"^thread: (\d+)$", re.M)
TOTALS = re.compile(r"^totals: (\d+)$", re.M)
KINDS = ("read 4096 1 100", "read 4096 16 20", "read 1048576 1 10", "write 4096 1 100", "write 1048576 1 10")


def count(program: str, transport: str, kind: str, folder: Path) -> tuple[float, float]:
    """Instructions an operation: (the client's, the server's)."""
    line = [
        "valgrind",
        "--tool=callgrind",
        "--fair-sched=yes",
        "--separate-threads=yes",
        "--instr-atstart=no",
    ]
    line += [f"--callgrind-out-file={folder}/out", program, "--no-skip", "--test-case=cost"]
    own = {
        "FFS_TEST_TRANSPORTS": transport,
        "FFS_TEST_IO_BACKEND": "pread",
        "LD_PRELOAD": f"{folder}/shim.so",
    }
    own["FFS_COST"] = kind
    done = subprocess.run(line, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    if done.returncode != 0 or "1 passed" not in done.stdout:
        sys.exit(f"{done.stdout}{done.stderr}\nit failed, with status {done.returncode}")
    client = server = 0.0
    at_once, times = (int(word) for word in kind.split()[2:])
    for path in folder.glob("out-*"):
        text = path.read_text()
        thread, totals = THREAD.search(text), TOTALS.search(text)
        if thread is None or totals is None:
            sys.exit(f"{path} isn't a part of one thread: {text[:400]}")
        each = int(totals[1]) / at_once / times
        client, server = (client + each, server) if thread[1] == "1" else (client, server + each)
        path.unlink()
    return client, server


def main() -> None:
    program, transport, *kinds = sys.argv[1:]
    print(f"{transport}: instructions an operation in user mode")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shim.c").write_text(SHIM)
        compiler = ["cc", "-shared", "-fPIC", "-O2", "-o", f"{folder}/shim.so", f"{folder}/shim.c"]
        subprocess.run(compiler, check=True)
        for kind in kinds or KINDS:
            client, server = count(program, transport, kind, folder)
            print(f"{kind}: client {client:.0f}, server {server:.0f}", flush=True)


if __name__ == "__main__":
    main()
