"""A process that writes through the native engine and says what it was acknowledged
(native/test/engine_file.cc, "worker"), and the same one as the judge of what is there afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

from guest_mapper import until_free

from ffs._native.device import device_format

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = bytes([9, *bytes(15)])  # native/test/engine_harness.h
TARGETS = [77, 78]


def program() -> Path:
    path = Path(os.environ.get("FFS_TEST_ENGINE", ROOT / "build/test/test_engine"))
    assert path.exists(), f"{path} isn't built: make native-test"
    return path


def prepare(path: str) -> None:
    device_format(path, cluster=CLUSTER, targets=TARGETS, journal_bytes=16 << 20, force=True)


class Writer:
    """Six chunks are replaced over and over. `known`: acknowledged before, checked at the start."""

    def __init__(self, path: str, known: dict[int, int]) -> None:
        self._path = path
        self._process = subprocess.Popen(
            [program(), "--test-case=worker"],
            env={**os.environ, "FFS_ENGINE_WORKER": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.acknowledged = dict(known)
        self.count = 0
        self.said: list[str] = []
        self._verified = threading.Event()
        self._more = threading.Condition()
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{key} {version}\n" for key, version in known.items()))
        self._process.stdin.close()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ack ") and line.count(" ") == 2 and line.endswith("\n"):
                _, key, version = line.split()
                with self._more:
                    self.acknowledged[int(key)] = int(version)
                    self.count += 1
                    self._more.notify_all()
            else:
                self.said.append(line)
                if line.startswith("verified "):
                    self._verified.set()
        self._verified.set()  # or its end
        with self._more:
            self._more.notify_all()

    def verified(self) -> int:
        """Waits until it has checked `known`; how many were right, each of them or it ended."""
        self._verified.wait(LIMIT_S)
        assert self.said[-1:] != [], "it ended without a word"
        assert self.said[-1].startswith("verified "), "".join(self.said)
        return int(self.said[-1].split()[1])

    def wait_for(self, count: int) -> None:
        with self._more:
            done = self._more.wait_for(lambda: self.count >= count or not self.running, LIMIT_S)
        assert done, f"{self.count} acknowledgements in {LIMIT_S} s"
        assert self.count >= count, "".join(self.said)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def pause(self) -> dict[int, int]:
        """Stops it; what it has said by then, which is all that it said."""
        self._process.send_signal(signal.SIGSTOP)
        return self._snapshot()

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def _snapshot(self) -> dict[int, int]:
        with self._more:
            return dict(self.acknowledged)

    def kill(self) -> None:
        self._process.kill()
        self.ended()
        until_free(self._path)

    def ended(self) -> int:
        """Waits for its end; the exit status."""
        status = self._process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status


LIMIT_S = 120.0  # only for a broken program
