"""Moving bytes over gRPC with nothing of ours: a stream of bytes, and one word at its end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from pd_grpc.bench.kv import ways
from pd_grpc.bench.kv.pool import MIB, KvPool
from pd_grpc.bench.kv.ways import Tables
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import DecodeConfig, PrefillConfig

_LIMIT_S = 60.0
_METHOD = "/bench/Take"


class Landing:
    """A server with one method, whose requests are the bytes themselves."""

    def __init__(self, lands: bool) -> None:
        self.lands = lands
        self._region = memoryview(b"")
        self._got = 0

    async def start(self, pool: KvPool, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        self._pool = pool
        self._server = grpc.aio.server(options=rpc.server_options(DecodeConfig()))
        take = grpc.stream_unary_rpc_method_handler(self._take)
        handler = grpc.method_handlers_generic_handler("bench", {"Take": take})
        self._server.add_generic_rpc_handlers((handler,))
        port = rpc.bind(self._server, "127.0.0.1", 0)
        await self._server.start()
        return {"endpoint": f"127.0.0.1:{port}"}

    async def expect(self, names: Sequence[str], tables: Tables) -> None:
        (table,) = tables
        self._region, self._got = self._pool.region(table), 0

    async def landed(self) -> None:
        if self._got != self._region.nbytes:
            raise RuntimeError(f"bare gRPC: {self._got} of {self._region.nbytes} bytes came")

    async def stop(self) -> None:
        await self._server.stop(0)

    async def _take(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        region, at = self._region, 0
        async for data in requests:
            if self.lands:
                region[at : at + len(data)] = data
            at += len(data)
        self._got = at
        return b"1"


class Sending(ways.Sending):
    """A client of it, with the channel options of ours."""

    def __init__(self) -> None:
        self._channel: grpc.aio.Channel | None = None

    async def start(
        self, pool: KvPool, settings: Mapping[str, Any], address: Mapping[str, Any]
    ) -> None:
        self._pool = pool
        config = PrefillConfig()
        self._channel = rpc.aio_channel(address["endpoint"], config, config)

    async def send(self, names: Sequence[str], tables: Tables) -> list[float]:
        assert self._channel is not None
        (table,) = tables
        region = self._pool.region(table)
        method: Any = self._channel.stream_unary(_METHOD, None, None)
        began = time.perf_counter()
        call = method(timeout=_LIMIT_S)
        for at in range(0, region.nbytes, MIB):
            await call.write(bytes(region[at : at + MIB]))
        await call.done_writing()
        await call
        return [time.perf_counter() - began]

    async def stop(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)
