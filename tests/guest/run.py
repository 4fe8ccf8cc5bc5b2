"""Boots a guest without KVM, runs one command in it and ends with that command's exit status.

    tests/guest/run.sh [--seconds 300] [--memory 3G] [--keep FOLDER] -- COMMAND...

One argument is a line for the shell, several are a command and its arguments. The guest sees the host's files
at the same paths (what it writes goes to memory and is lost), runs the command as root in the current folder,
and has

- ``rxe0``: software RDMA over ``dummy0`` (10.99.0.1, GID index 1);
- ``/dev/disk-block512`` and ``/dev/disk-block4096``: empty emulated NVMe devices of 1 GiB with such blocks;
- ``/scratch``: an ext4 on a third one, also TMPDIR; ``/mnt/guest/keep``: its files lie in --keep afterwards;
- FFS_GUEST=1 in its environment, no limit of locked memory, device-mapper, veth and netem.

The command's output is this program's. The console is shown where the guest came to no end of its own; then
the exit status is 125, or 124 where it ran past its seconds.
"""

import argparse
import ctypes
import fcntl
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "build/guest"
GIB = 1 << 30
DISKS = {"block512": (512, GIB), "block4096": (4096, GIB), "scratch": (4096, 4 * GIB)}
KERNEL = (
    "console=ttyS0 quiet panic=-1 nokaslr mitigations=off tsc=reliable no_timer_check random.trust_cpu=on"
)
PR_SET_PDEATHSIG = 1


def machine(run: Path, memory: str) -> list[str]:
    """qemu's command line. Nothing of it outlives the process: the disks are files in ``run``."""
    line = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
    line += ["-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max,la57=off", "-smp", "2", "-m", memory]
    line += ["-kernel", f"{STORE}/vmlinux", "-initrd", f"{STORE}/initramfs", "-append", KERNEL]
    line += ["-serial", f"file:{run}/console", "-serial", "stdio"]
    line += ["-virtfs", "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap"]
    line += ["-virtfs", f"local,path={run},mount_tag=run,security_model=none"]
    for name, (block, _) in DISKS.items():
        blocks = f"logical_block_size={block},physical_block_size={block}"
        line += ["-drive", f"file={run}/{name},format=raw,if=none,id={name},cache=unsafe,discard=unmap"]
        line += ["-device", f"nvme,id=ctl-{name},serial={name}"]
        line += ["-device", f"nvme-ns,drive={name},bus=ctl-{name},{blocks}"]
    return line


def make_disks(run: Path) -> None:
    for name, (_, size) in DISKS.items():
        with open(run / name, "wb") as file:
            file.truncate(size)
    options = ["-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard"]
    subprocess.run(["mkfs.ext4", "-q", "-F", *options, f"{run}/scratch"], check=True)


def exit_status(console: str, word: str) -> int | None:
    """What the guest said on its console, None where it said nothing."""
    for line in reversed(console.splitlines()):
        _, mark, status = line.partition(f"guest-exit {word} ")
        if mark and status.strip().isdigit():
            return int(status)
    return None


def with_parent() -> None:
    """In the child: niced, and killed with this program, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(5)


def boot(run: Path, seconds: float, memory: str) -> bool:
    """Whether the machine came to an end of its own in time."""
    process = subprocess.Popen(machine(run, memory), stdin=subprocess.DEVNULL, preexec_fn=with_parent)
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        process.kill()
        process.wait()


def work(run: Path, args: argparse.Namespace) -> int:
    word = secrets.token_hex(8)
    line = args.command[0] if len(args.command) == 1 else shlex.join(args.command)
    (run / "keep").mkdir()
    (run / "command").write_text(line + "\n")
    (run / "job.env").write_text(f"WORD={word}\nFOLDER={shlex.quote(os.getcwd())}\n")
    shutil.copy(ROOT / "tests/guest/inside.sh", run / "inside.sh")
    make_disks(run)
    with open(STORE / "one", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        begin = time.monotonic()
        ended = boot(run, args.seconds, args.memory)
        took = time.monotonic() - begin
    console = (run / "console").read_text(errors="replace")
    status = exit_status(console, word)
    if args.keep:
        shutil.copytree(run / "keep", args.keep, dirs_exist_ok=True)
        (args.keep / "console").write_text(console)
    if status is None:
        sys.stderr.write(console)
        how = "ended without a status" if ended else "was stopped, still running,"
        print(f"the guest {how} after {took:.0f} s", file=sys.stderr)
        return 125 if ended else 124
    print(f"guest: exit status {status} after {took:.0f} s", file=sys.stderr)
    return status


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/guest/run.sh", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=300, help="until it is stopped (300)")
    parser.add_argument("--memory", default="3G", help="as qemu takes it (3G)")
    parser.add_argument("--keep", type=Path, help="a folder for what the command left in /mnt/guest/keep")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Path(tempfile.mkdtemp(prefix="ffs-guest-"))
    try:
        return work(run, args)
    finally:
        shutil.rmtree(run)


if __name__ == "__main__":
    sys.exit(main())
