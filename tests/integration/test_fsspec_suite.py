"""The abstract suite of fsspec, whole, over a cluster."""

from __future__ import annotations

import pytest
from fsspec.tests import abstract

from ffs.fsspec import FfsFileSystem


class Fixtures(abstract.AbstractFixtures):
    """What the suite asks of a file system under test."""

    @pytest.fixture
    def fs(self, address: str) -> FfsFileSystem:
        return FfsFileSystem(address)

    @pytest.fixture
    def fs_path(self, home: str) -> str:
        return home


class TestCopy(abstract.AbstractCopyTests, Fixtures):
    pass


class TestGet(abstract.AbstractGetTests, Fixtures):
    pass


class TestPut(abstract.AbstractPutTests, Fixtures):
    pass


class TestOpen(abstract.AbstractOpenTests, Fixtures):
    pass


class TestPipe(abstract.AbstractPipeTests, Fixtures):
    pass
