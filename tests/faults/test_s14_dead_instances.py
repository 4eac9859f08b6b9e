"""S14: what was meant for an instance that is gone is never acted on by the one in its place."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc.aio

from pd_grpc.protocol.faults import Reason
from pd_grpc.testing.faults import Injector, Kind, Rule
from pd_grpc.testing.faults_client import client_interceptors
from pd_grpc.v1 import decode_pb2_grpc
from tests.decode.wire import Wire, fault_of, tokens_of, wire

ON_ITS_WAY_S = 1.0
"""Longer than it takes to stop the dead one."""


async def test_what_was_on_its_way_to_the_dead_one_changes_nothing() -> None:
    place: dict[str, Any] = {"port": _free_port(), "bulk_port": _free_port(), "grace_s": 0.1}
    faults = Injector(Rule(Kind.DELAY, delay_s=ON_ITS_WAY_S))
    async with wire(**place) as dead:
        p = await dead.prefill()
        granted, asked = dead.request(), dead.request()
        grant = await p.allocate(granted)
        channel = grpc.aio.insecure_channel(
            dead.server.endpoint,
            options=[("grpc.initial_reconnect_backoff_ms", 50)],
            interceptors=client_interceptors(faults),
        )
        p.decode = decode_pb2_grpc.DecodeServiceStub(_Waiting(channel))
        late = [
            asyncio.ensure_future(fault_of(call))
            for call in (
                p.allocate(asked),
                p.first_token(granted, grant.grant_id, 7),
                p.release(granted),
            )
        ]
    async with wire(**place) as new, channel:
        assert (new.server.endpoint, new.server.name) == (dead.server.endpoint, dead.server.name)
        refused = await asyncio.gather(*late)
        assert faults.strikes() == 3
        assert [fault.reason for fault in refused] == [Reason.NO_SESSION] * 3
        _untouched(new)
        # The same P, which now knows the new one, still says what it meant for the dead one.
        again = await new.prefill()
        for call in (
            again.allocate(asked),
            again.first_token(granted, grant.grant_id, 7),
            again.release(granted),
        ):
            assert (await fault_of(call)).reason is Reason.STALE_EPOCH
        _untouched(new)
        request = new.request()
        answer = new.generate(request)
        await again.hand_over(request)
        assert await tokens_of(answer) == new.answer(request)


def _untouched(d: Wire) -> None:
    ledger = d.server.machine.ledger
    assert not ledger.transfers and len(ledger.tombstones) == 0
    assert d.server.pool.free == d.server.pool.total


class _Waiting:
    """A channel whose unary calls wait for the server to be there."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        call: Any = self._channel.unary_unary(*args, **kwargs)
        return lambda request, timeout: call(request, timeout=timeout, wait_for_ready=True)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._channel.stream_stream(*args, **kwargs)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
