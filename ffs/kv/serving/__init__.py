"""What the adapters of inference engines have in common (docs/kv.md): names of blocks, memory of the
engine as Iovs, a store that never raises and never hangs, and threads to wait in."""

from ffs.kv.serving.breaker import Breaker, State
from ffs.kv.serving.lanes import Lanes
from ffs.kv.serving.memory import Regions
from ffs.kv.serving.names import block_keys, namespace
from ffs.kv.serving.store import BlockStore, Counts, Settings

__all__ = [
    "BlockStore",
    "Breaker",
    "Counts",
    "Lanes",
    "Regions",
    "Settings",
    "State",
    "block_keys",
    "namespace",
]
