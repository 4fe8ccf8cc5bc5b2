"""What a tier of a KV cache keeps: eviction orders, admission, pins and water marks, all in bytes, all pure
(docs/kv_tiers.md, Policies). No clock, no thread, no I/O: the tier manager calls these under its own lock."""

from ffs.kv.policy.adaptive import Adaptive
from ffs.kv.policy.admission import ScanGuard, Sketch
from ffs.kv.policy.lru import Lru
from ffs.kv.policy.lru_k import LruK
from ffs.kv.policy.order import Order, make_order
from ffs.kv.policy.pins import Lease, Pins
from ffs.kv.policy.residency import Marks, Residency
from ffs.kv.policy.s3_fifo import S3Fifo

__all__ = [
    "Adaptive",
    "Lease",
    "Lru",
    "LruK",
    "Marks",
    "Order",
    "Pins",
    "Residency",
    "S3Fifo",
    "ScanGuard",
    "Sketch",
    "make_order",
]
