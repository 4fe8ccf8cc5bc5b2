"""Work on chunks for the metadata service, through a client ring of this process's own.

Removing what deleted files leave, cutting chunks, asking for the last one: each goes to the chain's head
as any client's request does, under a capability for the cluster. One thread owns the ring; requests come
from the event loop, completions go back to it. docs/control_plane.md, Storage control.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ffs._native.iov import Iov
from ffs._native.ring import OP_LIST_CHUNKS, WAIT_NEEDS_CAPABILITY, NativeClient, Ring
from ffs._native.routes import ChainRoute, TargetRoute
from ffs.errors import FfsError, ShutDown
from ffs.proto.chain_calls import RemoveSpaces, RemoveSpacesReply
from ffs.proto.cluster import collector_client
from ffs.proto.common import (
    CAPABILITY_CLUSTER,
    RIGHT_READ,
    RIGHT_REMOVE,
    RIGHT_WRITE,
    Capability,
    Message,
    OkReply,
    encode_capability,
    error_reply,
)
from storage_server.chunk_work import LISTING_BYTES, Listing, Operation, Request, Steps, removal_of, steps_of

log = logging.getLogger("ffs.storage.collector")

ENTRIES: Final = 256
TIMEOUT_MS: Final = 15_000
CAPABILITY_MS: Final = 600_000  # manager time; renewed at half of it
POLL_MS: Final = 100  # the ring's own timeouts are looked at so often
NUDGE_S: Final = 0.001
LISTINGS: Final = 8  # at once; others wait
REMOVAL_S: Final = 4.0  # of one RemoveSpaces: with an operation that times out less than its asker waits
_UNDER_WAY: Final = OkReply()  # instead of a result that isn't there yet


@dataclass(slots=True, eq=False)
class _Together:
    """Works that are answered at once, by what each came to."""

    future: asyncio.Future[list[Message | FfsError]]
    results: list[Message | FfsError]
    left: int


@dataclass(slots=True)
class _Work:
    chain: int
    steps: Steps
    together: _Together
    at: int = 0  # in its results
    place: int = -1  # a listing's, in the memory for them


class Collector:
    """Start it after registration; `close` joins its thread. `ask` belongs to the event loop."""

    def __init__(
        self,
        node: int,
        incarnation: int,
        cluster: bytes,
        manager_ms: Callable[[], int],
        loop: asyncio.AbstractEventLoop,
        sign: Callable[[Capability], bytes] = encode_capability,
    ) -> None:
        """`sign`: makes the bytes of its capability; called from its thread too."""
        self._sign = sign
        self._client_id = collector_client(node, incarnation)
        self._manager_ms = manager_ms
        self._loop = loop
        self._client = NativeClient(self._client_id, cluster, request_timeout_ms=TIMEOUT_MS)
        self._capability_issued_ms = manager_ms()
        self._capability = self._client.add_capability(self._make_capability())
        self._waiting: deque[_Work] = deque()
        self._places = list(range(LISTINGS))
        self._unplaced: deque[tuple[_Work, Operation]] = deque()  # listings that wait for a place
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ffs-collector")
        self._thread.start()

    def set_routing(self, epoch: int, chains: Sequence[ChainRoute], targets: Sequence[TargetRoute]) -> None:
        """Any thread."""
        self._client.set_routing(epoch, chains, targets)

    async def ask(self, request: Request) -> Message:
        """The reply, or the error of the chain."""
        (result,) = await self._do([(request.chain, steps_of(request))])
        if isinstance(result, FfsError):
            raise result
        return result

    async def remove_spaces(self, request: RemoveSpaces) -> RemoveSpacesReply:
        """Side by side; as many as the ring takes."""
        until_s = self._loop.time() + REMOVAL_S
        works = [
            (chain, removal_of(chain, space, request.epoch, lambda: self._loop.time() < until_s))
            for chain, space in request.pairs
        ]
        results = await self._do(works) if works else []
        return RemoveSpacesReply(
            failed=tuple(
                (at, error_reply(result)) for at, result in enumerate(results) if isinstance(result, FfsError)
            )
        )

    async def _do(self, works: Sequence[tuple[int, Steps]]) -> list[Message | FfsError]:
        if self._stopping:
            raise ShutDown("this storage process is stopping")
        together = _Together(self._loop.create_future(), [_UNDER_WAY] * len(works), len(works))
        self._waiting.extend(_Work(chain, steps, together, at) for at, (chain, steps) in enumerate(works))
        os.eventfd_write(self._wake, 1)
        return await together.future

    def renew(self) -> None:
        """Keys have changed: makes its capability anew. Any thread."""
        if not self._stopping:
            self._renew()

    def close(self) -> None:
        """What is under way gets ShutDown. Blocking until the thread has ended. Repeatable."""
        if self._stopping:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._client.close()

    # the thread

    def _run(self) -> None:
        running: dict[int, _Work] = {}
        try:
            with Iov(LISTINGS * LISTING_BYTES) as self._memory, Ring(self._client, ENTRIES) as ring:
                self._serve(ring, running)
        except FfsError as error:
            log.error("the collector's ring failed: %s", error)
        finally:
            self._stopping = True
            for work in [*running.values(), *self._waiting, *(work for work, _ in self._unplaced)]:
                self._answer(work, ShutDown("this storage process is stopping"))

    def _serve(self, ring: Ring, running: dict[int, _Work]) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.register(ring.fileno(), select.POLLIN)
        number = 0
        while not self._stopping:
            while self._waiting and len(running) < ENTRIES:
                number += 1
                self._step(ring, running, number, self._waiting.popleft(), None)
            while self._unplaced and self._places and len(running) < ENTRIES:
                number += 1
                self._place_one(ring, running, number)
            # With least=0 a ring doesn't finish connecting (it only looks); so it is given a moment.
            completions, events = ring.wait(1 if running else 0, NUDGE_S)
            for cqe in completions:
                number += 1
                self._step(ring, running, number, running.pop(int(cqe["userdata"])), cqe)
            if events & WAIT_NEEDS_CAPABILITY or self._capability_is_old():
                self._renew()
            if len(completions) == 0:
                poller.poll(POLL_MS if running else 1000)
                self._drain_wake()

    def _step(
        self, ring: Ring, running: dict[int, _Work], number: int, work: _Work, completion: object
    ) -> None:
        """Gives the work its completion (None: it begins), and the ring the next operation that it wants."""
        answer = completion
        if work.place >= 0:
            start = work.place * LISTING_BYTES
            answer = Listing(completion, self._memory.buffer()[start : start + LISTING_BYTES])
        try:
            wanted = work.steps.send(answer)
            self._prepare(ring, running, number, work, wanted)
        except StopIteration as done:
            self._answer(work, done.value)
        except FfsError as error:
            self._answer(work, error)
        self._leave(running, number, work)

    def _leave(self, running: dict[int, _Work], number: int, work: _Work) -> None:
        """What isn't in the ring needs no place."""
        if work.place >= 0 and number not in running:
            self._places.append(work.place)
            work.place = -1

    def _prepare(
        self, ring: Ring, running: dict[int, _Work], number: int, work: _Work, wanted: Operation
    ) -> None:
        """Gives the ring an operation; a listing waits for its place in memory."""
        data = None
        if wanted.op == OP_LIST_CHUNKS:
            if not self._places:
                self._unplaced.append((work, wanted))
                return
            work.place = self._places.pop()
            start = work.place * LISTING_BYTES
            data = self._memory[start : start + LISTING_BYTES]
        ring.prepare_one(
            wanted.op,
            work.chain,
            self._capability,
            wanted.key,
            0,
            wanted.length,
            data,
            number,
            flags=wanted.flags,
            space_epoch=wanted.epoch,
            timeout_ms=TIMEOUT_MS,
            priority=128,
        )
        running[number] = work

    def _place_one(self, ring: Ring, running: dict[int, _Work], number: int) -> None:
        work, wanted = self._unplaced.popleft()
        try:
            self._prepare(ring, running, number, work, wanted)
        except FfsError as error:
            self._answer(work, error)
            self._leave(running, number, work)

    def _drain_wake(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return

    def _answer(self, work: _Work, result: Message | FfsError) -> None:
        together = work.together
        together.results[work.at] = result
        together.left -= 1
        if together.left:
            return

        def deliver() -> None:
            if not together.future.done():
                together.future.set_result(together.results)

        self._loop.call_soon_threadsafe(deliver)

    # the capability

    def _make_capability(self) -> bytes:
        return self._sign(
            Capability(
                kind=CAPABILITY_CLUSTER,
                rights=RIGHT_READ | RIGHT_WRITE | RIGHT_REMOVE,
                client=self._client_id,
                space=0,
                epoch=0,
                expiry_ms=self._manager_ms() + CAPABILITY_MS,
                id=self._client_id,
            )
        )

    def _capability_is_old(self) -> bool:
        return self._manager_ms() - self._capability_issued_ms > CAPABILITY_MS // 2

    def _renew(self) -> None:
        self._capability_issued_ms = self._manager_ms()
        self._client.renew_capability(self._capability, self._make_capability())
