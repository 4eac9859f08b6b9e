"""What goes wrong while a call is made is the end of that call alone."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pd_grpc.protocol.faults import Code, TransportFault
from pd_grpc.protocol.interception import Guard


def test_what_an_embedder_raises_is_internal(caplog: pytest.LogCaptureFixture) -> None:
    with Guard() as guard:
        raise LookupError("no such tenant")
    assert isinstance(guard.fault, TransportFault) and guard.fault.code is Code.INTERNAL
    assert guard.fault.message.endswith("LookupError"), "what it says may be of a prompt"
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_what_a_call_ends_with_is_read() -> None:
    with grpc.insecure_channel("127.0.0.1:1") as channel, Guard() as guard:
        channel.unary_unary("/test.Echo/One", bytes, bytes)(b"", timeout=60)
    assert isinstance(guard.fault, TransportFault) and guard.fault.peer_lost


@pytest.mark.parametrize("cancel", [grpc.FutureCancelledError, asyncio.CancelledError])
def test_a_cancel_passes(cancel: type[BaseException]) -> None:
    guard = Guard()
    with pytest.raises(cancel), guard:
        raise cancel
    assert guard.fault is None


def test_nothing_is_wrong_with_a_call_that_is_answered() -> None:
    with Guard() as guard:
        pass
    assert guard.fault is None
