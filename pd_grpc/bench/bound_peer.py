"""The row that preparing costs nothing in: every grant is there before it is asked for.

The grants are real ones, fetched from D by real Allocates before the clock starts, so that D serves
the requests as in every other row; only the conversation and D's door are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from pd_grpc.bench.legs import BenchRequest, allocate_request
from pd_grpc.prefill.actions import SendAllocate
from pd_grpc.prefill.events import AllocateAnswered
from pd_grpc.prefill.peer import DecodePeer, Feed, Metadata
from pd_grpc.prefill.runtime import PrefillRuntime
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.v1 import decode_pb2, decode_pb2_grpc

_AT_ONCE = 64


class Prefetched:
    """Grants by transfer id."""

    def __init__(self, config: PrefillConfig) -> None:
        self._config = config
        self._grants: dict[str, decode_pb2.AllocateResponse] = {}

    def peer(self, endpoint: str, config: PrefillConfig, feed: Feed) -> DecodePeer:
        """What reaches one D; as `PeerFactory`."""
        return _PrefetchedPeer(endpoint, config, feed, self._grants)

    async def fetch(
        self, runtime: PrefillRuntime, endpoint: str, requests: Iterable[BenchRequest]
    ) -> None:
        """Have D grant these, in the name of P's session with it, which must be open."""
        session = runtime.machine.conversations[endpoint]
        gate = asyncio.Semaphore(_AT_ONCE)
        async with rpc.aio_channel(endpoint, self._config, self._config) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)

            async def one(request: BenchRequest) -> None:
                body = allocate_request(
                    request, session.session_id, session.instance.epoch, self._config
                )
                async with gate:
                    self._grants[request.transfer_id] = await stub.Allocate(
                        body, timeout=self._config.request_budget_s
                    )

            await asyncio.gather(*(one(request) for request in requests))

    def stop(self) -> None:
        """Nothing runs."""


class _PrefetchedPeer(DecodePeer):
    def __init__(
        self,
        endpoint: str,
        config: PrefillConfig,
        feed: Feed,
        grants: dict[str, decode_pb2.AllocateResponse],
    ) -> None:
        super().__init__(endpoint, config, feed)
        self._grants = grants

    def allocate(self, asked: SendAllocate, metadata: Metadata) -> None:
        grant = self._grants.pop(asked.key.transfer_id, None)
        if grant is None:
            super().allocate(asked, metadata)
        else:
            self._feed(AllocateAnswered(asked, grant, None))
