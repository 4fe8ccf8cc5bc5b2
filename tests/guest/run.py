"""Boots a guest without KVM, runs one command in it and ends with that command's exit status.

    tests/guest/run.sh [--seconds 300] [--memory 3G] [--keep FOLDER] [--peer COMMAND] -- COMMAND...

One argument is a line for the shell, several are a command and its arguments. The guest sees the host's files
at the same paths (what it writes goes to memory and is lost), runs the command as root in the current folder,
and has

- ``rxe0``: software RDMA over ``dummy0`` (10.99.0.1, GID index 1);
- ``/dev/disk-block512`` and ``/dev/disk-block4096``: empty emulated NVMe devices of 1 GiB with such blocks;
  ``cluster512`` and ``cluster4096``: two more, for a cluster that runs beside;
- ``/scratch``: an ext4 on a third one, also TMPDIR; ``/mnt/guest/keep``: its files lie in --keep afterwards;
- FFS_GUEST=1 in its environment, no limit of locked memory, device-mapper, veth and netem.

With --peer a second guest, of one processor, runs that command. Both see the same /mnt/guest, and each
other over eth0 (10.98.0.1 and 10.98.0.2). The file /mnt/guest/kill-peer has the second one
killed, as a power cut does it; it goes with the first.

The command's output is this program's. The console is shown where the guest came to no end of its own; then
the exit status is 125, or 124 where it ran past its seconds. A kernel that stands still while it boots, which
was seen once under emulation, is booted again: the command has not begun then.
"""

import argparse
import ctypes
import fcntl
import mmap
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
DISKS |= {"cluster512": (512, GIB), "cluster4096": (4096, GIB)}
KERNEL = "console=ttyS0 panic=-1 nokaslr mitigations=off tsc=reliable no_timer_check random.trust_cpu=on"
READ_TSC = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; shl rdx, 32; or rax, rdx; ret
PEER_MEMORY = "1G"
BOOT_SECONDS = 180  # it takes 8, and 30 where others need the processors
BOOTS = 3
SPOKEN = (
    "console1",
    "console2",
    "output2",
)  # what is shown of a guest that fails; output1 is on stdout already
PR_SET_PDEATHSIG = 1


def tsc_khz() -> int:
    """How fast the counter of this machine's processors runs, which the guest reads as its own. The guest
    can't find out by itself where others use the processors too: its clock went three times too fast."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(READ_TSC)
    read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))

    def both() -> tuple[int, int]:
        """Counter and clock (ns) of one moment: of several tries the one that took least."""
        tries = []
        for _ in range(20):
            begin = time.monotonic_ns()
            ticks = read()
            tries.append((time.monotonic_ns() - begin, ticks, begin))
        took, ticks, begin = min(tries)
        return ticks, begin + took // 2

    ticks, at = both()
    time.sleep(0.1)
    later_ticks, later = both()
    return (later_ticks - ticks) * 1_000_000 // (later - at)


def machine(run: Path, memory: str, role: int = 1, *, wired: bool = False) -> list[str]:
    """qemu's command line. Nothing of it outlives the process: the disks are files in ``run``. ``role``: 1,
    or 2 for the peer; ``wired``: with a cable between the two."""
    line = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
    line += ["-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max,la57=off", "-m", memory]
    line += ["-smp", "2" if role == 1 else "1"]
    line += [
        "-kernel",
        f"{STORE}/vmlinux",
        "-initrd",
        f"{STORE}/initramfs",
        "-append",
        f"{KERNEL} tsc_early_khz={tsc_khz()} guest={role}",
    ]
    line += ["-serial", f"file:{run}/console{role}", "-serial"]
    line += ["stdio"] if role == 1 else [f"file:{run}/output2"]
    line += ["-virtfs", "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap"]
    line += ["-virtfs", f"local,path={run},mount_tag=run,security_model=none"]
    if wired:
        here, there = f"{run}/cable{role}", f"{run}/cable{3 - role}"
        line += [
            "-netdev",
            f"dgram,id=n,local.type=unix,local.path={here},remote.type=unix,remote.path={there}",
        ]
        line += ["-device", f"virtio-net-pci,netdev=n,mac=02:00:00:00:98:0{role}"]
    for name, (block, _) in DISKS.items():
        if role == 2 and name != "scratch":
            continue
        blocks = f"logical_block_size={block},physical_block_size={block}"
        line += ["-drive", f"file={run}/{name}{role},format=raw,if=none,id={name},cache=unsafe,discard=unmap"]
        line += ["-device", f"nvme,id=ctl-{name},serial={name}"]
        line += ["-device", f"nvme-ns,drive={name},bus=ctl-{name},{blocks}"]
    return line


def make_disks(run: Path, role: int = 1) -> None:
    for name, (_, size) in DISKS.items():
        with open(run / f"{name}{role}", "wb") as file:
            file.truncate(size)
    options = ["-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard"]
    subprocess.run(["mkfs.ext4", "-q", "-F", *options, f"{run}/scratch{role}"], check=True)


def exit_status(console: str, word: str) -> int | None:
    """What the guest said on its console, None where it said nothing."""
    for line in reversed(console.splitlines()):
        _, mark, status = line.partition(f"guest-exit {word} ")
        if mark and status.strip().isdigit():
            return int(status)
    return None


def with_parent() -> None:
    """In the child: killed with this program, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start(line: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(line, stdin=subprocess.DEVNULL, preexec_fn=with_parent)


def is_up(run: Path, words: dict[int, str], role: int) -> bool:
    """Whether this guest has said that its command begins."""
    try:
        return f"guest-up {words[role]}" in (run / f"console{role}").read_text(errors="replace")
    except FileNotFoundError:
        return False


def boot(run: Path, seconds: float, memory: str, words: dict[int, str], peer: bool) -> bool | None:
    """Whether the machine came to an end of its own in time. None: a guest didn't get to its command."""
    machines = {1: start(machine(run, memory, wired=peer))}
    if peer:
        machines[2] = start(machine(run, PEER_MEMORY, 2, wired=True))
    try:
        begin = time.monotonic()
        booting = set(machines)
        while machines[1].poll() is None:
            booting -= {role for role in booting if is_up(run, words, role)}
            if booting and time.monotonic() - begin > BOOT_SECONDS:
                return None
            if time.monotonic() - begin > seconds:
                return False
            if peer and (run / "kill-peer").exists():
                machines[2].kill()
            time.sleep(0.05)
        return True
    finally:
        for each in machines.values():
            each.kill()
            each.wait()


def shell_line(words: list[str]) -> str:
    return words[0] if len(words) == 1 else shlex.join(words)


def work(run: Path, args: argparse.Namespace) -> int:
    words = {role: secrets.token_hex(8) for role in (1, 2)}
    (run / "keep").mkdir()
    for role, line in ((1, shell_line(args.command)), (2, args.peer)):
        if line is None:
            continue
        (run / f"command{role}").write_text(line + "\n")
        (run / f"job{role}.env").write_text(f"WORD={words[role]}\nFOLDER={shlex.quote(os.getcwd())}\n")
        make_disks(run, role)
    shutil.copy(ROOT / "tests/guest/inside.sh", run / "inside.sh")
    with open(STORE / "one", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in reversed(range(BOOTS)):
            begin = time.monotonic()
            ended = boot(run, args.seconds, args.memory, words, args.peer is not None)
            took = time.monotonic() - begin
            if ended is not None or not left:
                break
            stood = max(run.glob("console[12]"), key=lambda path: path.stat().st_mtime)
            last = "".join(stood.read_text(errors="replace").splitlines(keepends=True)[-5:])
            print(
                f"the guest stood still while it booted and is booted again; it said last\n{last}",
                file=sys.stderr,
            )
    said = {path.name: path.read_text(errors="replace") for path in run.glob("*[12]") if path.name in SPOKEN}
    status = exit_status(said.get("console1", ""), words[1])
    if args.keep:
        shutil.copytree(run / "keep", args.keep, dirs_exist_ok=True)
        for name, text in said.items():
            (args.keep / name).write_text(text)
    if status != 0:
        for name, text in sorted(said.items()):
            sys.stderr.write(f"--- {name}\n{text}\n")
    if status is None:
        how = "ended without a status" if ended else "was stopped, still running,"
        how = f"didn't get to its command {BOOTS} times, the last one" if ended is None else how
        print(f"the guest {how} after {took:.0f} s", file=sys.stderr)
        return 125 if ended else 124
    print(f"guest: exit status {status} after {took:.0f} s", file=sys.stderr)
    return status


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/guest/run.sh", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=300, help="until it is stopped (300)")
    parser.add_argument("--memory", default="3G", help="as qemu takes it (3G)")
    parser.add_argument("--keep", type=Path, help="a folder for what the command left in /mnt/guest/keep")
    parser.add_argument("--peer", metavar="COMMAND", help="a line for the shell of a second guest")
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
