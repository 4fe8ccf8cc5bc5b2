"""Devices of the device mapper, made and changed by `dmsetup`."""

from __future__ import annotations

import os
import subprocess
import time
from errno import EBUSY
from types import TracebackType

SECTOR = 512


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
    return done.stdout


def linear(base: str, begin: int, size: int) -> str:
    """The table of a part of `base`; bytes."""
    return f"0 {size // SECTOR} linear {base} {begin // SECTOR}"


def until_free(path: str) -> None:
    """The kernel takes the rings of the killed apart in the background, and what they had open."""
    limit = time.monotonic() + 60
    while True:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_EXCL))
            return
        except OSError as error:
            if error.errno != EBUSY or time.monotonic() > limit:
                raise
            time.sleep(0.02)


class Mapped:
    """One device; it goes with the block that it is made for."""

    def __init__(self, name: str, table: str) -> None:
        self.name = name
        self.path = f"/dev/mapper/{name}"
        run("dmsetup", "create", name, "--noudevsync", "--table", table)
        run("dmsetup", "mknodes", name)

    def load(self, table: str) -> None:
        """The new table holds for every request that isn't completed yet by the time this returns."""
        run("dmsetup", "load", self.name, "--table", table)
        run("dmsetup", "suspend", "--noudevsync", "--nolockfs", self.name)
        run("dmsetup", "resume", "--noudevsync", self.name)

    def message(self, *words: str) -> None:
        run("dmsetup", "message", self.name, "0", *words)

    def __enter__(self) -> Mapped:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        run("dmsetup", "remove", "--noudevsync", "--retry", self.name)
