"""Ranks that do something together, step by step: what goes wrong on one of them, all learn at the next step,
and one that is silent for too long is named (docs/guides/checkpoint.md, Shared loads).

Every step begins with a meeting: each rank tells rank 0 how it goes, which tells all. Bytes go between two
ranks, by torch.distributed over a group that has gloo.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from ffs.checkpoint.commit import RankFailed
from ffs.checkpoint.errands import Errands
from ffs.checkpoint.tensors import Bytes
from ffs.errors import InvalidArgument

PATIENCE_S: Final = 300.0
_BEAT_S: Final = 1.0  # a rank that is still busy says so
_FOREVER: Final = datetime.timedelta(days=365)
_TOLD_BYTES: Final = 2000  # of an error


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """`where`: the step that a rank has come to. `body`: None while it is still busy."""

    where: str
    error: str | None = None
    body: bytes | None = None


class Circle:
    """A `with` block that all ranks of the group enter, and leave together: by its end, or all with an error.
    All methods are collective and blocking. Not for several threads.

    patience_s: how long a rank may be silent. One that computes or reads isn't: it says that it is busy."""

    def __init__(self, group: Any = None, patience_s: float = PATIENCE_S) -> None:
        """Collective where the group hasn't gloo: then a group of its own is made, of the same ranks.
        InvalidArgument: torch.distributed isn't initialised."""
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidArgument(
                "ranks share a load by torch.distributed, which isn't initialised: load without share"
            )
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._patience_s = patience_s
        self._over = False
        self._waiter = Errands("ffs-circle")
        self._group, self._made = group, None
        if "cpu:gloo" not in str(dist.get_backend_config(group)):
            self._group = self._made = dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=datetime.timedelta(seconds=2 * patience_s),
                backend="gloo",
                use_local_synchronization=True,
            )

    # steps

    def meet(self, where: str, body: bytes = b"") -> list[bytes]:
        """What each rank says at this step. RankFailed: one has failed, or is silent; InvalidArgument: they
        aren't at the same step."""
        said = self._exchange(_Said(where, None, body))
        return [each.body or b"" for each in said]

    def ready(self, where: str, work: Future[Any]) -> None:
        """Until the work is done on all ranks; its own error is raised here, and the others' as `meet`."""
        while True:
            wait([work], _BEAT_S)
            if work.done() and (error := work.exception()) is not None:
                raise error
            said = self._exchange(_Said(where, None, b"" if work.done() else None))
            if all(each.body is not None for each in said):
                return

    def gather(self, where: str, body: bytes) -> list[bytes]:
        """As `meet`, for more than a few words."""
        sizes = [int(each) for each in self.meet(where, str(len(body)).encode())]
        mine = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        mine[: len(body)] = torch.frombuffer(bytearray(body or b"\0"), dtype=torch.uint8)[: len(body)]
        all_of_them = [torch.empty_like(mine) for _ in sizes]
        work = dist.all_gather(all_of_them, mine, group=self._group, async_op=True)
        self._wait(work, 2 * self._patience_s, "a rank")
        return [each.numpy()[:size].tobytes() for each, size in zip(all_of_them, sizes, strict=True)]

    def exchange(self, out: list[tuple[int, Bytes]], into: list[tuple[int, Bytes]]) -> None:
        """Hands bytes to ranks, and takes others from ranks, one message each for a pair; both sides know the
        sizes. RankFailed names the one that didn't."""
        works = [(rank, self._send(rank, data)) for rank, data in out]
        works += [(rank, self._receive(rank, data)) for rank, data in into]
        failure: RankFailed | None = None
        for rank, work in works:
            try:
                self._wait(work, self._patience_s, f"rank {rank}")
            except RankFailed as error:
                failure = failure or error
        if failure is not None:
            raise failure

    # the block

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The last step. What went wrong here is told to the others first."""
        try:
            if error is None:
                self.meet("end")
            elif not self._over:
                self._tell(error)
        finally:
            self._waiter.close()
            if self._made is not None:
                dist.destroy_process_group(self._made)

    def _tell(self, error: BaseException) -> None:
        # RankFailed: this very error, or what others say. This rank's own is raised.
        with contextlib.suppress(RankFailed):
            self._exchange(_Said("", f"{type(error).__name__}: {error}"[:_TOLD_BYTES]))

    # inside

    def _exchange(self, mine: _Said) -> list[_Said]:
        try:
            said = self._by_rank_0(mine)
        except BaseException:
            self._over = True
            raise
        failed = [f"rank {rank} failed: {each.error}" for rank, each in enumerate(said) if each.error]
        if failed:
            self._over = True
            raise RankFailed("the ranks' load is given up: " + "; ".join(failed[:3]))
        if len({each.where for each in said}) > 1:
            self._over = True
            words = ", ".join(f"rank {rank} is at {each.where!r}" for rank, each in enumerate(said[:4]))
            raise InvalidArgument(f"all ranks must share the same loads, in the same order: {words}")
        return said

    def _by_rank_0(self, mine: _Said) -> list[_Said]:
        if self.rank:
            # Longer than rank 0 waits for the others.
            self._send_words(0, msgspec.msgpack.encode(mine), 3 * self._patience_s)
            words = self._receive_words(0, 3 * self._patience_s)
            return msgspec.msgpack.decode(words, type=list[_Said])
        said = [mine]
        for rank in range(1, self.world):
            try:
                words = self._receive_words(rank, 2 * self._patience_s)
                said.append(msgspec.msgpack.decode(words, type=_Said))
            except RankFailed as error:
                said.append(_Said(mine.where, str(error)))
        words = msgspec.msgpack.encode(said)
        for rank in range(1, self.world):
            try:
                self._send_words(rank, words, self._patience_s)
            except RankFailed:
                continue  # one that is gone; the others must hear of it
        return said

    def _send_words(self, rank: int, words: bytes, patience_s: float) -> None:
        data = np.frombuffer(bytearray(words), np.uint8)
        works = [
            self._send(rank, np.array([len(words)], np.int64).view(np.uint8)),
            self._send(rank, data),
        ]
        for work in works:
            self._wait(work, patience_s, f"rank {rank}")

    def _receive_words(self, rank: int, patience_s: float) -> bytes:
        size = np.zeros(1, np.int64)
        self._wait(self._receive(rank, size.view(np.uint8)), patience_s, f"rank {rank}")
        data = np.empty(int(size[0]), np.uint8)
        self._wait(self._receive(rank, data), patience_s, f"rank {rank}")
        return data.tobytes()

    def _send(self, rank: int, data: Bytes) -> Any:
        return self._begun(rank, lambda: dist.isend(_tensor(data), group=self._group, group_dst=rank))

    def _receive(self, rank: int, data: Bytes) -> Any:
        return self._begun(rank, lambda: dist.irecv(_tensor(data), group=self._group, group_src=rank))

    def _begun(self, rank: int, begin: Callable[[], Any]) -> Any:
        try:
            return begin()
        except RuntimeError as error:
            raise RankFailed(f"rank {rank} is gone: {_first_line(error)}") from error

    def _wait(self, work: Any, patience_s: float, whom: str) -> None:
        """In a thread, which is left behind if nothing comes: gloo's own timeout would end the connections to
        all ranks, which must still hear of it."""
        try:
            self._waiter.do(lambda: work.wait(_FOREVER)).result(patience_s)
        except TimeoutError as error:
            self._waiter = Errands("ffs-circle")
            raise RankFailed(f"{whom} was silent for {patience_s:g} s: look whether it still runs") from error
        except RuntimeError as error:
            raise RankFailed(f"{whom} is gone: {_first_line(error)}") from error


def _tensor(data: Bytes) -> torch.Tensor:
    return torch.from_numpy(data)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
