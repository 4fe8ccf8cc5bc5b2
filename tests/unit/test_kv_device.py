"""Device memory above the tiers, on a CPU tensor: the same code as on a GPU, with copies that a test may
hold back."""

from __future__ import annotations

from typing import Any

import pytest

from ffs import errors
from ffs.kv.keys import Identity, hash_tokens
from ffs.kv.tiers import Outcome, Settings, TierManager
from ffs.kv.tiers.device import CpuCopies, DeviceTier, Event

torch = pytest.importorskip("torch")

KEYS = hash_tokens(Identity("device", block_tokens=1), range(100))
BLOCK = 4096


def content(key: bytes) -> Any:
    return torch.frombuffer(bytearray(key * (BLOCK // len(key))), dtype=torch.uint8)


class SlowEvent:
    """A copy that takes place when somebody waits for it, or lets it."""

    def __init__(self, copies: SlowCopies, work: Any) -> None:
        self._copies, self._work = copies, work

    def done(self) -> bool:
        return self._work is None

    def block(self) -> None:
        """The side stream goes in order: all before it come first."""
        while self._work is not None:
            self._copies.step()

    wait_here = wait_on_side = block

    def run(self) -> None:
        self._work()
        self._work = None


class SlowCopies(CpuCopies):
    def __init__(self) -> None:
        self.line: list[SlowEvent] = []
        self.most = 0

    def copy(self, target: Any, source: Any) -> Event:
        event = SlowEvent(self, lambda: target.copy_(source))
        self.line.append(event)
        self.most = max(self.most, len(self.line))
        return event

    def step(self) -> None:
        self.line.pop(0).run()


@pytest.fixture(params=["at once", "slow"])
def copies(request: pytest.FixtureRequest) -> CpuCopies:
    return CpuCopies() if request.param == "at once" else SlowCopies()


def host(slots: int = 32) -> TierManager:
    return TierManager(Settings(block_bytes=BLOCK, host_bytes=slots * BLOCK, least_in_flight=4))


def test_blocks_go_down_and_come_back_in_order(copies: CpuCopies) -> None:
    with host() as tiers:
        with DeviceTier(tiers, torch.zeros(8, BLOCK, dtype=torch.uint8), copies=copies) as device:
            for key in KEYS[:20]:
                if not device.put(key, content(key)):  # all slots are on their way out
                    device.drain()
                    assert device.put(key, content(key))
            device.drain()
            assert device.copied_out == 20
            assert all(tiers.where(key) is not None for key in KEYS[:20])
            assert sum(key in device for key in KEYS) == 8
            with device.stream(KEYS[:22], depth=3) as stream:
                for block in stream:
                    if block.position < 20:
                        assert block.outcome is Outcome.HIT
                        assert torch.equal(block.memory, content(block.key))
                    else:
                        assert block.memory is None
            assert stream.missed == [20, 21]
            assert stream.failed == []
            assert device.copied_in + device.hits == 20
            assert len(device._pins) == 0
        assert tiers.stats().pinned_blocks == 0
    if isinstance(copies, SlowCopies):
        assert copies.most >= 3  # copies were ahead of what was used
        assert copies.line == []


def test_a_block_is_seen_below_only_when_its_copy_is_over() -> None:
    """K1: a slot that is still being filled isn't visible."""
    copies = SlowCopies()
    pool = torch.zeros(4, BLOCK, dtype=torch.uint8)
    with host() as tiers, DeviceTier(tiers, pool, copies=copies) as device:
        assert device.put(KEYS[0], content(KEYS[0]))
        assert tiers.where(KEYS[0]) is None
        assert device.poll() == 1
        device.drain()
        assert tiers.where(KEYS[0]) is not None
        with tiers.fetch([KEYS[0]]) as stream:
            memory = stream.wait_all()[0].memory
            assert memory is not None
            assert bytes(memory.view) == content(KEYS[0]).numpy().tobytes()


@pytest.mark.parametrize("how", ["break", "raise", "unread"])
def test_a_stream_that_ends_early_leaves_no_pin(copies: CpuCopies, how: str) -> None:
    """K18, on the device and in host memory."""
    pool = torch.zeros(6, BLOCK, dtype=torch.uint8)
    with host() as tiers, DeviceTier(tiers, pool, copies=copies) as device:
        for key in KEYS[:16]:
            device.put(key, content(key))
            device.drain()
        with device.stream(KEYS[:16], depth=2) as stream:
            if how != "unread":
                for at, block in enumerate(stream):
                    assert torch.equal(block.memory, content(block.key))
                    if at == 3:
                        break
        assert len(device._pins) == 0
        assert tiers.stats().pinned_blocks == 0
        with device.stream([KEYS[1], KEYS[2], KEYS[1], KEYS[1]], depth=4) as again:
            assert [torch.equal(block.memory, content(block.key)) for block in again] == [True] * 4


def test_what_cant_be_is_refused() -> None:
    with host() as tiers:
        for pool in (
            torch.zeros(4, BLOCK // 2, dtype=torch.uint8),
            torch.zeros(4, BLOCK, dtype=torch.float16),
            torch.zeros(4 * BLOCK, dtype=torch.uint8),
        ):
            with pytest.raises(errors.InvalidArgument, match="contiguous tensor of bytes"):
                DeviceTier(tiers, pool)
        device = DeviceTier(tiers, torch.zeros(4, BLOCK, dtype=torch.uint8))
        device.close()
        device.close()
        with pytest.raises(errors.BadHandle):
            device.put(KEYS[0], content(KEYS[0]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_same_on_a_gpu() -> None:
    with host() as tiers:
        pool = torch.zeros(8, BLOCK, dtype=torch.uint8, device="cuda")
        with DeviceTier(tiers, pool) as device:
            for key in KEYS[:20]:
                assert device.put(key, content(key).cuda())
            device.drain()
            with device.stream(KEYS[:20]) as stream:
                for block in stream:
                    assert torch.equal(block.memory.cpu(), content(block.key))
            assert device.copied_in > 0
