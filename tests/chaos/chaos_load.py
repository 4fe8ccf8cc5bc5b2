"""Runs the workers (chaos_work.py) against a cluster, gathers their histories and judges them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from chaos_work import BLOCK, CHUNK, SLOTS, Config
from lin_checker import check
from lin_history import Operation, by_key, load
from lin_models import Slots

import ffs
from ffs.kv import Space

SPACE = "/chaos/blocks"


@dataclass(slots=True)
class Outcome:
    operations: list[Operation] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def judge(self) -> list[str]:
        """What is wrong with it, for people; empty if nothing is."""
        found = list(self.wrong)
        for key, history in by_key(self.operations).items():
            verdict = check(history, Slots(SLOTS))
            if not verdict.linearizable:
                found.append(f"{key}: {verdict}")
        return found

    def longest_ms(self, kinds: tuple[str, ...]) -> float:
        """The longest that one successful operation of these kinds took."""
        took = [
            op.returned_ns - op.called_ns
            for op in self.operations
            if op.kind in kinds and op.returned_ns is not None
        ]
        return max(took, default=0) / 1e6


class Load:
    """`prepare`, `start`, ..., `finish`."""

    def __init__(
        self,
        root: Path,
        address: str,
        secret_file: Path,
        *,
        seed: int,
        workers: int = 3,
        threads: int = 2,
        files: int = 3,
        registers: int = 4,
        timeout_s: float = 20.0,
    ) -> None:
        self._root = root
        self._files = [f"/chaos/f{at}" for at in range(files)]
        self._configs = [
            Config(
                address=address,
                secret_file=str(secret_file),
                worker=worker,
                threads=threads,
                seed=seed,
                files=self._files,
                registers=registers,
                space=SPACE,
                blocks=40,
                timeout_s=timeout_s,
                history=str(root / f"history{worker}.jsonl"),
            )
            for worker in range(workers)
        ]
        self._running: list[subprocess.Popen[str]] = []

    def prepare(self, client: ffs.Client) -> None:
        client.makedirs("/chaos", exist_ok=True)
        for path in self._files:
            with client.open(path, "wb", chunk_size=CHUNK) as file:
                file.write(bytes(CHUNK * self._configs[0].registers))
        Space.create(client, SPACE, block_bytes=BLOCK).close()

    def start(self) -> None:
        for config in self._configs:
            path = self._root / f"worker{config.worker}.json"
            path.write_bytes(msgspec.json.encode(config))
            log = open(self._root / f"worker{config.worker}.log", "ab")  # noqa: SIM115 - the child's
            popen = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("chaos_work.py")), str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            log.close()
            self._running.append(popen)
        for popen in self._running:
            assert popen.stdout is not None
            assert popen.stdout.readline() == "started\n", self.words()

    def finish(self) -> Outcome:
        outcome = Outcome()
        for popen in self._running:
            assert popen.stdin is not None
            popen.stdin.close()
        for popen, config in zip(self._running, self._configs, strict=True):
            assert popen.stdout is not None
            text = popen.stdout.read()
            assert popen.wait(120) == 0, self.words()
            popen.stdout.close()
            said = json.loads(text)
            outcome.wrong += said["wrong"]
            outcome.errors.update(said["errors"])
            outcome.operations += load(Path(config.history))
        self._running.clear()
        return outcome

    def close(self) -> None:
        for popen in self._running:
            popen.kill()
            popen.wait()
            for pipe in (popen.stdin, popen.stdout):
                if pipe is not None:
                    pipe.close()

    def words(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self._root.glob("worker*.log")))
