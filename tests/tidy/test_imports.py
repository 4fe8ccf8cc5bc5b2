"""Who may import whom (docs/architecture.md, The house): every Python import and C++ #include is
walked, and an edge that breaks a rule is printed with its file and line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A module belongs to the unit with the longest prefix here.
PYTHON_UNITS = [
    "metadata", "storage_server", "ffs", "ffs.errors", "ffs.layout", "ffs.proto", "ffs.rpc", "ffs._native",
    "ffs.client", "ffs.kv", "ffs.checkpoint", "ffs.data", "ffs.fsspec", "ffs.cli",
]  # fmt: skip

# unit -> units that it may import, beside itself. `ffs` is the package's front door.
PYTHON_ALLOWED: dict[str, set[str]] = {
    "ffs.errors": set(),
    "ffs.layout": {"ffs.errors"},
    "ffs.proto": {"ffs.errors", "ffs.layout"},
    "ffs.rpc": {"ffs.proto", "ffs.errors"},
    "ffs._native": {"ffs.errors"},
    "ffs.client": {"ffs.rpc", "ffs._native", "ffs.layout", "ffs.proto", "ffs.errors"},
    "ffs": {"ffs.client", "ffs._native", "ffs.errors", "ffs.layout", "ffs.cli"},
    "ffs.kv": {"ffs.client", "ffs._native", "ffs.layout", "ffs.proto", "ffs.errors", "ffs"},
    "ffs.checkpoint": {"ffs.client", "ffs.layout", "ffs.proto", "ffs.errors", "ffs"},
    "ffs.data": {"ffs.client", "ffs.layout", "ffs.proto", "ffs.errors", "ffs"},
    "ffs.fsspec": {"ffs.client", "ffs.layout", "ffs.proto", "ffs.errors", "ffs"},
    "ffs.cli": {
        "ffs.client", "ffs.kv", "ffs.checkpoint", "ffs.data", "ffs._native", "ffs.rpc", "ffs.proto",
        "ffs.layout", "ffs.errors", "ffs",
    },
    "metadata": {"ffs.rpc", "ffs.proto", "ffs.errors", "ffs.layout"},
    "storage_server": {"ffs.rpc", "ffs.proto", "ffs.errors", "ffs._native", "ffs.layout"},
}  # fmt: skip

NATIVE_ALLOWED: dict[str, set[str]] = {
    "base": set(),
    "io": {"base"},
    "engine": {"io", "base"},
    "craq": {"base"},
    "net": {"base"},
    "server": {"io", "engine", "craq", "net", "base"},
    "client": {"io", "net", "base"},
    "bench": {"engine", "io", "net", "base"},
    "capi": {"server", "client", "engine", "craq", "bench", "net", "io", "base"},
}
# ffs/wire.h is everyone's (frames); ffs/ffs.h is the C ABI and belongs to capi.
PUBLIC_HEADERS = {
    "ffs/wire.h": {"net", "server", "client", "bench", "capi", "engine"},
    "ffs/ffs.h": {"capi", "server", "client", "bench", "craq"},
}


@dataclass(frozen=True)
class Edge:
    """One import: where it stands and what it reaches."""

    file: str
    line: int
    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.source} must not reach {self.target}"


def unit_of(module: str) -> str | None:
    """The unit with the longest prefix of ``module``, or None for a foreign one."""
    fits = [unit for unit in PYTHON_UNITS if module == unit or module.startswith(unit + ".")]
    return max(fits, key=len, default=None)


def imports_of(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Absolute names of all that a module imports, at any depth (lazy imports count too)."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                # `from ffs import kv` reaches ffs.kv, `from ffs.layout import Layout` ffs.layout.
                name = f"{base}.{alias.name}"
                yield node.lineno, name if unit_of(name) != unit_of(base) else base


def python_breaks(files: dict[str, str]) -> list[Edge]:
    """Every forbidden edge among ``files`` (path -> text)."""
    broken = []
    for path, text in files.items():
        parts = list(Path(path).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        source = unit_of(module)
        assert source is not None, f"{path} is in no unit: add it to PYTHON_UNITS"
        for line, name in imports_of(ast.parse(text, path), module, is_package):
            target = unit_of(name)
            if target is None or target == source or target in PYTHON_ALLOWED[source]:
                continue
            if target == "ffs" and name == "ffs":
                continue  # the bare package, as `import ffs` in a guide's example
            broken.append(Edge(path, line, source, target))
    return broken


def native_breaks(files: dict[str, str]) -> list[Edge]:
    """Every forbidden #include among ``files`` (path below native/ -> text)."""
    broken = []
    for path, text in files.items():
        folder = Path(path).parts[0]
        if folder in ("test", "fuzz", "include"):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            match = re.match(r'\s*#\s*include\s+["<]([^">]+)[">]', line)
            if match is None:
                continue
            header = match.group(1)
            if header in PUBLIC_HEADERS:
                if folder not in PUBLIC_HEADERS[header]:
                    broken.append(Edge(f"native/{path}", number, folder, header))
            elif "/" in header and header.split("/")[0] in NATIVE_ALLOWED:
                target = header.split("/")[0]
                if target != folder and target not in NATIVE_ALLOWED[folder]:
                    broken.append(Edge(f"native/{path}", number, folder, target))
    return broken


def sources(pattern: str, *folders: str) -> dict[str, str]:
    found = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob(pattern)):
            found[str(path.relative_to(ROOT))] = path.read_text()
    return found


def test_python_imports_keep_the_rules() -> None:
    files = sources("*.py", "ffs", "metadata", "storage_server")
    assert len(files) > 10
    assert not python_breaks(files), "\n".join(map(str, python_breaks(files)))


def test_native_includes_keep_the_rules() -> None:
    native = sources("*.cc", "native") | sources("*.h", "native")
    files = {path.removeprefix("native/"): text for path, text in native.items()}
    assert len(files) > 10
    assert not native_breaks(files), "\n".join(map(str, native_breaks(files)))


def test_only_native_uses_cffi() -> None:
    for path, text in sources("*.py", "ffs", "metadata", "storage_server").items():
        if not path.startswith("ffs/_native/"):
            assert not re.search(r"^\s*(import|from) cffi", text, re.MULTILINE), path


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("ffs/client/file.py", "import metadata.kv"),
        ("ffs/client/file.py", "from metadata import server"),
        ("metadata/server.py", "def f():\n    from ffs.client import connect"),
        ("metadata/server.py", "import storage_server"),
        ("ffs/rpc/pool.py", "from .. import _native"),
        ("ffs/kv/space.py", "from ffs import checkpoint"),
    ],
)
def test_a_forbidden_python_edge_is_seen(path: str, text: str) -> None:
    assert len(python_breaks({path: text})) == 1


def test_a_forbidden_include_is_seen() -> None:
    assert native_breaks({"craq/replica.cc": '#include "engine/chunk_store.h"'})
    assert native_breaks({"engine/index.cc": '#include "craq/replica.h"'})
    assert native_breaks({"client/ring.cc": '#include "server/loop.h"'})
    assert not native_breaks({"server/loop.cc": '#include "craq/replica.h"'})
