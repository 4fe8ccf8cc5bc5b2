"""Where the processes of a cluster under test run: hosts that can be cut off from each other.

`Namespaces`: a network namespace a host, joined by veth pairs to a bridge; a cut is a link-layer address
that nobody has, set in one namespace for another: packets vanish without a word, in one direction. Needs
root and `ip`. `Loopback`: everything on 127.0.0.1, no cuts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

NOBODY = "02:00:00:00:00:77"


class Loopback:
    can_cut = False

    def address(self, host: str) -> str:
        return "127.0.0.1"

    def command(self, host: str) -> list[str]:
        return []

    def cut(self, source: str, destination: str) -> None:
        raise NotImplementedError("loopback has no cuts")

    def heal(self) -> None:
        pass

    def close(self) -> None:
        pass


class Namespaces:
    """Hosts by name; the caller itself is on the bridge. `close` removes all that was made."""

    can_cut = True

    def __init__(self, hosts: list[str]) -> None:
        self._tag = f"f{os.getpid() % 100000}"
        self._bridge = f"{self._tag}b"
        self._net = _free_net()
        self._number = {host: at + 2 for at, host in enumerate(hosts)}
        self._cuts: set[tuple[str, str]] = set()
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def address(self, host: str) -> str:
        return f"{self._net}.{self._number[host]}"

    def command(self, host: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace(host)]

    def inside(self, host: str) -> str:
        """The name of its interface, in its namespace."""
        return f"{self._tag}i{self._number[host]}"

    def outside(self, host: str) -> str:
        """The other end of its cable, at the bridge."""
        return f"{self._tag}o{self._number[host]}"

    def namespace(self, host: str) -> str:
        return f"{self._tag}-{host}"

    def cut(self, source: str, destination: str) -> None:
        """From now on nothing goes from one to the other; the other way packets still arrive."""
        if (source, destination) not in self._cuts:
            words = ("lladdr", NOBODY, "dev", self.inside(source), "nud", "permanent")
            self._in(source, "neigh", "replace", self.address(destination), *words)
            self._cuts.add((source, destination))

    def heal(self) -> None:
        for source, destination in sorted(self._cuts):
            self._in(source, "neigh", "del", self.address(destination), "dev", self.inside(source))
        self._cuts.clear()

    def close(self) -> None:
        for host in self._number:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self.namespace(host))
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._bridge)

    def _in(self, host: str, *words: str) -> None:
        _ip("-n", self.namespace(host), *words)

    def _make(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self._net}.1/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for host in self._number:
            outside, inside = self.outside(host), self.inside(host)
            _ip("netns", "add", self.namespace(host))
            _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
            _ip("link", "set", inside, "netns", self.namespace(host))
            _ip("link", "set", outside, "master", self._bridge)
            _ip("link", "set", outside, "up")
            self._in(host, "addr", "add", f"{self.address(host)}/24", "dev", inside)
            self._in(host, "link", "set", inside, "up")
            self._in(host, "link", "set", "lo", "up")


Hosts = Loopback | Namespaces


@contextlib.contextmanager
def hosts(names: list[str]) -> Iterator[Hosts]:
    """Namespaces where they can be had, else loopback (and it says so)."""
    made: Hosts
    if os.geteuid() == 0 and shutil.which("ip") is not None:
        try:
            made = Namespaces(names)
        except subprocess.CalledProcessError as error:
            print(f"no network namespaces ({(error.stderr or '').strip()}): nothing is cut off in this run")
            made = Loopback()
    else:
        print("no network namespaces (they need root and `ip`): nothing is cut off in this run")
        made = Loopback()
    try:
        yield made
    finally:
        made.heal()
        made.close()


def _free_net() -> str:
    """A private /24 of the benchmarking range (RFC 2544) that no other test has."""
    taken = _ip("-4", "-o", "addr")
    for at in range(250):
        net = f"198.18.{(os.getpid() + at) % 250 + 1}"
        if f" {net}.1/" not in taken:
            return net
    raise AssertionError("250 bridges of tests are left: ip link del")


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
