"""torch DataLoader workers that read through ffs, by every way of making processes; samples are checked."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import pytest

import ffs
from ffs.client.client import Client

torch = pytest.importorskip("torch")

SAMPLES = 240
SAMPLE_BYTES = 24_001
CHUNK = 65536
WORKERS = 4


def sample(index: int) -> np.ndarray[Any, Any]:
    """What stands in the file."""
    return np.random.default_rng(index).integers(0, 256, SAMPLE_BYTES, np.uint8)


class Samples:
    """Reads in three ways: an open file that came along, a file opened by path, a ring of its own."""

    def __init__(self, client: Client, path: str) -> None:
        self.client = client
        self.path = path
        self.file = client.open(path, "rb", 0)
        self.buffered = client.open(path, "rb")
        self._ring: ffs.Ior | None = None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        offset = index * SAMPLE_BYTES
        if index % 3 == 0:
            data = self.file.pread(SAMPLE_BYTES, offset)
        elif index % 3 == 1:
            self.buffered.seek(offset)
            data = self.buffered.read(SAMPLE_BYTES)
        else:
            data = self._read_by_ring(offset)
        return index, torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def _read_by_ring(self, offset: int) -> bytes:
        if self._ring is None:
            self._ring, self._iov = ffs.Ior(self.client, 16), ffs.Iov(1 << 16)
        self._ring.prepare(self.file, offset, self._iov[0:SAMPLE_BYTES])
        [done] = self._ring.wait(1)
        assert done.error is None
        return bytes(self._iov.buffer()[: done.result])


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_read_every_sample(client: Client, home: str, method: str) -> None:
    """Two passes of persistent workers, in the midst of which the parent goes on reading."""
    path = f"{home}/samples"
    with client.open(path, "wb", chunk_size=CHUNK) as file:
        for index in range(SAMPLES):
            file.write(sample(index))
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        multiprocessing.set_forkserver_preload(["torch", "ffs.client.client"])
    dataset = Samples(client, path)
    assert torch.equal(
        dataset[1][1], torch.from_numpy(sample(1))
    )  # rings and a lane exist when workers start
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=8,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
        multiprocessing_context=context,
        generator=torch.Generator().manual_seed(1),
    )
    for _ in range(2):
        seen: list[int] = []
        for indexes, rows in loader:
            for index, row in zip(indexes.tolist(), rows, strict=True):
                assert np.array_equal(row.numpy(), sample(index)), f"sample {index} is wrong"
                seen.append(index)
            assert dataset[seen[-1]][1].shape == (SAMPLE_BYTES,)
        assert sorted(seen) == list(range(SAMPLES))
    dataset.file.close()
    dataset.buffered.close()
