"""Peers that no test harms serve the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lanes import end_shared_peers


@pytest.fixture(scope="session", autouse=True)
def _shared_peers() -> Iterator[None]:
    yield
    end_shared_peers()
