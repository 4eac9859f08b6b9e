"""Faults in what P writes: a request to D, or an event to its caller, altered on its way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pd_grpc.prefill.peer import DecodePeer
from pd_grpc.prefill.requests import Requests

Change = Callable[[Any], object]


def before_call(patch: pytest.MonkeyPatch, method: str, change: Change) -> None:
    """Alter the request of a call to D: `allocate`, `send_first_token` or `release`."""
    right = getattr(DecodePeer, method)

    def wrong(self, action, *metadata):  # type: ignore[no-untyped-def]
        change(action.request)
        right(self, action, *metadata)

    patch.setattr(DecodePeer, method, wrong)


def before_event(patch: pytest.MonkeyPatch, change: Change) -> None:
    """Alter an event before the caller gets it; None leaves it out."""
    right = Requests.emit

    def wrong(self, record, response):  # type: ignore[no-untyped-def]
        if change(response) is not None:
            right(self, record, response)

    patch.setattr(Requests, "emit", wrong)
