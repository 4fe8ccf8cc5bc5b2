"""How full devices are, as their nodes say: shown by statfs at once, stored now and then for the other
processes and for the primary that comes next. One event loop.

docs/control_plane.md, Primary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from ffs.proto.cluster import TargetReport
from metadata.cluster.registry import Registry
from metadata.cluster.routing import RoutingCache

SAVE_S: Final = 2.0


class DeviceUsage:
    def __init__(self, registry: Registry, routing: RoutingCache, now_s: Callable[[], float]) -> None:
        self._registry = registry
        self._routing = routing
        self._now_s = now_s
        self._saved_s = float("-inf")

    def heard(self, node: int, reports: Mapping[int, TargetReport]) -> None:
        """A heartbeat of a node. A device's first is stored soon."""
        view = self._routing.view
        for device in view.nodes[node].devices:
            report = next((reports[t] for t in device.targets if t in reports), None)
            if report is not None:
                self._routing.heard_usage[device.uuid] = (report.capacity_bytes, report.free_bytes)
                if device.uuid not in view.usage:
                    self._saved_s = float("-inf")

    async def save(self, nodes: Iterable[int]) -> None:
        """Stores what has changed of these nodes, unless it did so less than SAVE_S ago."""
        if self._now_s() - self._saved_s < SAVE_S:
            return
        self._saved_s = self._now_s()
        view = self._routing.view
        for node in nodes:
            devices = [
                (device.uuid, *self._routing.heard_usage[device.uuid])
                for device in view.nodes[node].devices
                if device.uuid in self._routing.heard_usage
            ]
            if any(view.usage.get(uuid) != (capacity, free) for uuid, capacity, free in devices):
                await self._registry.save_usage(node, devices)
