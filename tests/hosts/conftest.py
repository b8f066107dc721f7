"""Two hosts for the tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from _namespaces import Cluster, wired


@pytest.fixture(scope="session")
def namespaces() -> Iterator[tuple[str, str]]:
    with wired() as names:
        yield names


@pytest.fixture
def cluster(namespaces: tuple[str, str], tmp_path: Path) -> Iterator[Cluster]:
    """Two hosts that know each other and themselves by name."""
    made = Cluster(namespaces, tmp_path)
    yield made
    made.close()


@pytest.fixture
def homely(namespaces: tuple[str, str], tmp_path: Path) -> Iterator[Cluster]:
    """Two hosts whose own names lead to loopback."""
    made = Cluster(namespaces, tmp_path, at_home=True)
    yield made
    made.close()
