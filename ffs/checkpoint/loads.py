"""What `Manager.load` does: which checkpoint, where from, with whom (docs/guides/checkpoint.md, Loading)."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ffs.checkpoint import retention
from ffs.checkpoint.commit import step_name
from ffs.checkpoint.hold import Gone, Hold, held, holding
from ffs.checkpoint.load import load_held, own_part, shared_part
from ffs.checkpoint.manifest import Manifest
from ffs.checkpoint.near import near_files
from ffs.checkpoint.ranks import Ranks
from ffs.checkpoint.report import merge
from ffs.checkpoint.scratch import Scratch, copies
from ffs.checkpoint.staging import Pool
from ffs.client.copying import IovSlice
from ffs.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from ffs.checkpoint.circle import Circle
    from ffs.client.client import Client

_PLACES_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Loads:
    """Of checkpoints under `path`. One thread; blocking."""

    client: Client
    path: str
    ranks: Ranks
    scratch: Scratch | None
    pool: Pool | None

    def load(self, step: int | None, into: Any, per_rank: Any, strict: bool, share: bool) -> Any:
        """As Manager.load."""
        if share:
            return self._load_shared(step, into, per_rank, strict)
        while True:
            chosen = self._latest() if step is None else step
            if chosen is None:
                raise NotFound("there is no checkpoint yet", self.path)
            path = self._path_of(chosen)
            try:
                with holding(self.client, path) as hold:
                    return self._load(chosen, hold.manifest, into, per_rank, strict, hold=hold)
            except Gone:
                continue  # there is a newer one, or another of that number, or none
            except NotFound:
                if step is None and chosen not in retention.steps(self.client, self.path):
                    continue  # retention took it that moment; there is a newer one
                alone = self._only_local(chosen)
                if alone is None:
                    raise
            return self._load(chosen, alone, into, per_rank, strict)

    def _latest(self) -> int | None:
        return max(retention.steps(self.client, self.path), default=None)

    def _path_of(self, step: int) -> str:
        return posixpath.join(self.path, step_name(step))

    def _load_shared(self, step: int | None, into: Any, per_rank: Any, strict: bool) -> Any:
        from ffs.checkpoint.circle import Circle  # imports torch

        with Circle(self.ranks.group) as circle, contextlib.ExitStack() as holds:
            if circle.rank == 0:  # it holds the step before the others know which
                chosen = self._latest() if step is None else step
                if chosen is None:
                    raise NotFound("there is no checkpoint yet", self.path)
                manifest = holds.enter_context(held(self.client, self._path_of(chosen)))
                circle.meet("step", str(chosen).encode())
            else:
                chosen = int(circle.meet("step")[0])
                if step not in (None, chosen):
                    raise InvalidArgument(f"step {step} here, {chosen} on rank 0: share loads of one step")
                manifest = holds.enter_context(held(self.client, self._path_of(chosen)))
            return self._load(chosen, manifest, into, per_rank, strict, circle)

    def _load(
        self,
        step: int,
        manifest: Manifest,
        into: Any,
        per_rank: Any,
        strict: bool,
        circle: Circle | None = None,
        hold: Hold | None = None,
    ) -> Any:
        path = self._path_of(step)
        near = None
        if self.scratch is not None:
            near = near_files(self.scratch.root, self.scratch.run, step, manifest)
        if per_rank is not None:
            own = own_part(manifest, self.ranks.rank, path)
            load_held(self.client, path, own, per_rank, strict=strict, near=near, hold=hold)
        shared = shared_part(manifest)
        with self._places() as places:
            return load_held(
                self.client,
                path,
                shared,
                into,
                strict=strict,
                near=near,
                places=places,
                circle=circle,
                hold=hold,
            )

    def _only_local(self, step: int) -> Manifest | None:
        """The manifest of a local copy that is a whole checkpoint by itself."""
        if self.scratch is None or self.client.lexists(self._path_of(step)):
            return None
        for _, copy in copies(self.scratch.root, self.scratch.run, step):
            if copy.report.ranks == 1:
                return merge([copy.report], step, self._path_of(step))
        return None

    @contextlib.contextmanager
    def _places(self) -> Iterator[IovSlice | None]:
        """Of the memory for saves what loading takes, if it is free: it was touched, and known to servers."""
        region = None
        if self.pool is not None and not self.pool.used:
            region = self.pool.try_take(min(self.pool.nbytes, _PLACES_BYTES))
        if region is None:
            yield None
            return
        try:
            yield region.pool.iov[region.begin : region.begin + region.nbytes]
        finally:
            region.release()
