"""Fixtures of D's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.decode.harness import Harness
from tests.decode.prefill_peer import Prefill


@pytest.fixture
def d() -> Iterator[Harness]:
    """A D that must have all its blocks back at the end of the test."""
    d = Harness()
    yield d
    d.all_returned()


@pytest.fixture
def p(d: Harness) -> Prefill:
    """A P with a session."""
    return Prefill(d)
