"""These run in the guest of run.py (`make test-rdma`); elsewhere nothing of this folder is collected."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "chaos"))
sys.path.insert(0, str(HERE.parent / "unit"))  # wire_layouts.py
sys.path.insert(0, str(HERE.parent / "integration"))  # test_transports.py
pytest.register_assert_rewrite("test_transports")

if "FFS_GUEST" not in os.environ:
    collect_ignore_glob = ["*"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "takes_devices_away: before this process has opened an RDMA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A device goes only when nobody has it open any more, and ffs keeps those that it opened."""
    items.sort(key=lambda item: item.get_closest_marker("takes_devices_away") is None)
