"""Which of how many processes this one is, and one word that all agree on before they save."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from ffs.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Ranks:
    """`run`: a word of hex digits that is the same for all ranks of this job and unlike any other job's; "":
    asked of torch.distributed, by a broadcast when a Manager is made."""

    rank: int = 0
    count: int = 1
    run: str = ""
    group: Any = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            raise InvalidArgument(f"rank {self.rank} of {self.count}: give 0 to {self.count - 1}")
        if not all(c in "0123456789abcdef" for c in self.run):
            raise InvalidArgument(f"run {self.run!r}: give hex digits, the same on all ranks")

    @staticmethod
    def of_torch(group: Any = None) -> Ranks:
        """As torch.distributed has it; alone if it isn't initialised."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return Ranks()
        return Ranks(torch.distributed.get_rank(group), torch.distributed.get_world_size(group), group=group)

    def agree(self, mine: str) -> str:
        """The run's word. A collective over the group if there are several ranks and none was given."""
        if self.run or self.count == 1:
            return self.run or mine
        import torch.distributed as dist

        if not dist.is_initialized():
            raise InvalidArgument(
                f"{self.count} ranks without torch.distributed: give Ranks(rank, count, run=...), the same "
                "run on all of them"
            )
        words = [mine]
        dist.broadcast_object_list(words, group_src=0, group=self.group)
        return words[0]
