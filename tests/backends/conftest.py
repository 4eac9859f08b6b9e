"""The backends that operators have, where they are installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends import phoenix as backend


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[backend.Phoenix]:
    """A running Phoenix. Skips where `make phoenix` has not been run."""
    if not backend.INSTALLED.exists():
        pytest.skip("Phoenix is not installed: `make phoenix` puts it into .venv-phoenix")
    with backend.Phoenix(tmp_path_factory.mktemp("phoenix")) as running:
        yield running
