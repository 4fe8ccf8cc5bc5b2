"""Boots a guest without KVM, runs one command in it and ends with that command's exit status.

    tests/guest/run.sh [--seconds 300] [--memory 3G] [--keep FOLDER] -- COMMAND...

The guest sees the host's files (read-only, its own writes go to memory) at the same paths, runs as root, and has
``rxe0`` (RDMA over ``dummy0``, GID index 1), ``/dev/disk-block512`` and ``/dev/disk-block4096`` (emulated NVMe of 1 GiB,
empty), ``/scratch`` (ext4; also TMPDIR) and ``/mnt/guest/keep``, whose files lie in --keep afterwards.

Its output is this command's output, its console is shown where it didn't come to an end. 124: it ran past its seconds.
"""

import argparse
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
DISKS = {"block512": 512, "block4096": 4096}
DISK_BYTES = 1 << 30


def machine(run: Path, memory: str) -> list[str]:
    """qemu's command line. Nothing of it outlives the process: the disks are files in ``run``."""
    line = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
    line += ["-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max,la57=off", "-smp", "2", "-m", memory]
    line += ["-kernel", str(STORE / "vmlinux"), "-initrd", str(STORE / "initramfs")]
    line += ["-append", "console=ttyS0 quiet panic=-1 nokaslr mitigations=off tsc=reliable no_timer_check random.trust_cpu=on"]
    line += ["-serial", f"file:{run}/console", "-serial", "stdio"]
    line += ["-virtfs", "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap"]
    line += ["-virtfs", f"local,path={run},mount_tag=run,security_model=none"]
    for name in [*DISKS, "scratch"]:
        line += ["-drive", f"file={run}/{name},format=raw,if=none,id={name},cache=unsafe,discard=unmap"]
        line += ["-device", f"nvme,id=ctl-{name},serial={name}"]
        size = DISKS.get(name, 4096)
        line += ["-device", f"nvme-ns,drive={name},bus=ctl-{name},logical_block_size={size},physical_block_size={size}"]
    return line


def make_disks(run: Path) -> None:
    for name in [*DISKS, "scratch"]:
        with open(run / name, "wb") as file:
            file.truncate(DISK_BYTES if name in DISKS else 4 * DISK_BYTES)
    mkfs = ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard", str(run / "scratch")]
    subprocess.run(mkfs, check=True, stdout=subprocess.DEVNULL)


def exit_status(console: bytes, word: str) -> int | None:
    """What the guest said on its console, None where it said nothing."""
    for line in reversed(console.decode(errors="replace").splitlines()):
        before, mark, status = line.partition(f"guest-exit {word} ")
        if mark and status.strip().isdigit():
            return int(status)
    return None


def boot(run: Path, seconds: float, memory: str) -> bool:
    """Whether the machine came to an end of its own in time."""
    env = {**os.environ, "TMPDIR": str(run)}
    process = subprocess.Popen(machine(run, memory), stdin=subprocess.DEVNULL, env=env, preexec_fn=lambda: os.nice(5))
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        process.kill()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/guest/run.sh", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--memory", default="3G")
    parser.add_argument("--keep", type=Path, help="a folder for what the command leaves in /mnt/guest/keep")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Path(tempfile.mkdtemp(prefix="ffs-guest-"))
    try:
        return work(run, args)
    finally:
        shutil.rmtree(run)


def work(run: Path, args: argparse.Namespace) -> int:
    word = secrets.token_hex(8)
    (run / "keep").mkdir()
    (run / "command").write_text(args.command[0] if len(args.command) == 1 else shlex.join(args.command))
    (run / "job.env").write_text(f"WORD={word}\nFOLDER={shlex.quote(os.getcwd())}\n")
    shutil.copy(ROOT / "tests/guest/inside.sh", run / "inside.sh")
    make_disks(run)
    with open(STORE / "one", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        begin = time.monotonic()
        ended = boot(run, args.seconds, args.memory)
        took = time.monotonic() - begin
    console = (run / "console").read_bytes()
    status = exit_status(console, word)
    if args.keep:
        shutil.copytree(run / "keep", args.keep, dirs_exist_ok=True)
    if status is None:
        sys.stderr.write(console.decode(errors="replace"))
        print(f"the guest {'ended without a status' if ended else 'was stopped'} after {took:.0f} s", file=sys.stderr)
        return 125 if ended else 124
    print(f"guest: exit status {status} after {took:.0f} s", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
