"""Adapters against the real packages of their engines (`make test-adapters`, in an environment of its own).

Elsewhere the engines aren't there, and nothing here is collected.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ffs.cli.devcluster.state import Directory, Shape
from ffs.cli.devcluster.supervisor import Supervisor

sys.path.append(str(Path(__file__).parents[1] / "integration"))
from kv_blocks import stopped as stopped_servers

collect_ignore_glob = [
    pattern
    for package, pattern in (("vllm", "test_vllm*"), ("sglang", "test_sglang*"), ("lmcache", "test_lmcache*"))
    if importlib.util.find_spec(package) is None
]


class _Unneeded(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """SGLang imports torchvision for pictures, which no wheel has for a CPU-only torch of another version.
    Nothing of it is called here."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)

        def attribute(name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@pytest.fixture(scope="session", autouse=True)
def _no_pictures() -> None:
    if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("torchvision") is not None:
        return
    import transformers

    transformers.AutoProcessor  # noqa: B018 - asks whether torchvision is there, before it seems to be
    sys.meta_path.append(_Unneeded())


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    """A running cluster: three servers, two replicas."""
    shape = Shape(nodes=3, replicas=2, device_bytes=2 << 30, failure_timeout_ms=4000)
    supervisor = Supervisor(Directory(tmp_path_factory.mktemp("cluster") / "dir"), shape, lambda line: None)
    with supervisor.hold():
        supervisor.start(lambda: False)
        yield supervisor


@pytest.fixture(scope="session")
def address(cluster: Supervisor) -> str:
    return cluster.address


@pytest.fixture(scope="session")
def nowhere() -> str:
    """Where nobody listens."""
    return "127.0.0.1:9"


@pytest.fixture
def stopped(cluster: Supervisor) -> Callable[[], AbstractContextManager[None]]:
    """All storage servers, stopped for the time of `with stopped():`."""

    return lambda: stopped_servers(cluster, "node0", "node1", "node2")


@pytest.fixture
def space_path(tmp_path: Path) -> str:
    """A space of the test's own."""
    return f"/kv/{tmp_path.parent.name}-{tmp_path.name}"
