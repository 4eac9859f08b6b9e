"""Faults planted into P, D and the router, each of which breaks a promise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from pd_grpc.decode import prefill_desk
from pd_grpc.decode.sessions import Sessions
from tests.testing.planted_decode import DECODE, any_session
from tests.testing.planted_lending import LENDING
from tests.testing.planted_local import LOCAL
from tests.testing.planted_prefill import PREFILL
from tests.testing.planted_router import RECOVERING, ROUTER
from tests.testing.planted_shards import SHARDED
from tests.testing.planting import Planted

ALL = [*DECODE, *PREFILL, *ROUTER, *RECOVERING, *LENDING, *LOCAL, *SHARDED]


@contextlib.contextmanager
def planted(*faults: Planted) -> Iterator[None]:
    """The faults are there while this lasts."""
    with pytest.MonkeyPatch.context() as patch:
        for fault in faults:
            patch.setattr(fault.owner, fault.attribute, fault.instead)
        yield


def _no_check(*args: Any, **kwargs: Any) -> None:
    return None


NO_FENCE = [
    Planted("any session will do", Sessions, "of_call", any_session),
    Planted("any epoch will do", prefill_desk, "check_ref", _no_check),
]
"""Together: a message meant for a process that is gone is obeyed by the one in its place."""
