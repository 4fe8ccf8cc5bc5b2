"""Cables that lose and delay, between the hosts of tests/chaos/chaos_hosts.py."""

from __future__ import annotations

import json

from chaos_hosts import Namespaces
from guest_mapper import run


class Links:
    """Both ends of each host's cable pass a netem, so what comes and what goes suffers alike."""

    def __init__(self, hosts: Namespaces, names: list[str]) -> None:
        self._ends = [(["ip", "netns", "exec", hosts.namespace(name)], hosts.inside(name)) for name in names]
        self._ends += [([], hosts.outside(name)) for name in names]

    def worsen(self, *words: str) -> None:
        """As tc-netem(8) takes it: "loss", "5%"."""
        for prefix, device in self._ends:
            run(*prefix, "tc", "qdisc", "replace", "dev", device, "root", "netem", *words)

    def mend(self) -> None:
        for prefix, device in self._ends:
            run(*prefix, "tc", "qdisc", "del", "dev", device, "root")

    def dropped(self) -> int:
        """Packets that were lost since `worsen`, as the kernel counts them."""
        total = 0
        for prefix, device in self._ends:
            for each in json.loads(run(*prefix, "tc", "-s", "-j", "qdisc", "show", "dev", device)):
                total += each.get("drops", 0) if each["kind"] == "netem" else 0
        return total
