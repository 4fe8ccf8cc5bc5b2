"""FUSE mounts that pass a directory through, for `ffs bench fuse`: bindfs, and libfuse's own example, which
is compiled here from the source that its package brings. Blocking."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ffs.errors import AccessDenied, FfsError, Unsupported

FUSE_DEVICE = Path("/dev/fuse")
EXAMPLE = Path("/usr/share/doc/libfuse3-dev/examples/passthrough_ll.c")
READY_S = 10.0


def check_bindfs() -> None:
    """Raises what is missing, with the package: Unsupported, AccessDenied."""
    if not FUSE_DEVICE.exists():
        raise Unsupported("this kernel has no FUSE (modprobe fuse)", str(FUSE_DEVICE))
    if not os.access(FUSE_DEVICE, os.R_OK | os.W_OK):
        raise AccessDenied("FUSE isn't open to this user: run this as root", str(FUSE_DEVICE))
    for program, package in (("bindfs", "bindfs"), ("fusermount3", "fuse3")):
        if shutil.which(program) is None:
            raise Unsupported(f"{program} isn't here: apt install {package}")


def build_passthrough(directory: Path) -> tuple[Path | None, str]:
    """libfuse's passthrough_ll, or None and why not. Seconds."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not EXAMPLE.exists():
        return None, f"{EXAMPLE} isn't here: apt install libfuse3-dev"
    if compiler is None or shutil.which("pkg-config") is None:
        return None, "no C compiler: apt install gcc pkg-config"
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True)
    if flags.returncode != 0:
        return None, f"{flags.stderr.strip()}: apt install libfuse3-dev"
    program = directory / "passthrough_ll"
    command = [compiler, "-O2", "-D_FILE_OFFSET_BITS=64", str(EXAMPLE), "-o", str(program)]
    made = subprocess.run([*command, *flags.stdout.split()], capture_output=True, text=True)
    if made.returncode != 0:
        return None, f"compiling {EXAMPLE}: {made.stderr.strip().splitlines()[-1:]}"
    return program, ""


def bindfs_command(source: Path, mount: Path) -> list[str]:
    return ["bindfs", "-f", str(source), str(mount)]


def passthrough_command(program: Path, source: Path, mount: Path) -> list[str]:
    return [str(program), "-f", "-o", f"source={source},cache=never", str(mount)]


@contextlib.contextmanager
def mounted(command: Sequence[str], mount: Path, log: Path) -> Iterator[Path]:
    """Runs a FUSE program in the foreground, with its last word a mount point; yields that once it is
    mounted. FfsError with the program's last words. Nothing is left mounted."""
    mount.mkdir()
    with log.open("wb") as sink:
        process = subprocess.Popen(list(command), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
    try:
        deadline = time.monotonic() + READY_S
        while not os.path.ismount(mount):
            status = process.poll()
            if status is not None or time.monotonic() > deadline:
                how = "isn't ready in time" if status is None else f"ended with status {status}"
                words = log.read_text(errors="replace").strip().splitlines()[-1:]
                raise FfsError(f"{command[0]} {how}: {words[0] if words else 'it said nothing'}")
            time.sleep(0.02)
        yield mount
    finally:
        process.terminate()  # it unmounts
        try:
            process.wait(READY_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if os.path.ismount(mount):
            subprocess.run(["fusermount3", "-u", "-z", str(mount)], check=True)
        mount.rmdir()
