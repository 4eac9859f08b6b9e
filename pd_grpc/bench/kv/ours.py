"""Moving KV as the servers do by a transport of ours: P's bulk side and D's, between pools."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pd_grpc.bench.kv import ways
from pd_grpc.bench.kv.pool import LAYOUT, KvPool
from pd_grpc.bench.kv.pushing import LIMIT_S, Pusher
from pd_grpc.bench.kv.ways import Tables
from pd_grpc.decode import actions as act
from pd_grpc.decode import events as decode_ev
from pd_grpc.decode.bulk import BulkServer
from pd_grpc.decode.receiver import Receiver
from pd_grpc.decode.transfer import Owner
from pd_grpc.protocol.clock import SystemClock
from pd_grpc.protocol.config import DecodeConfig, PrefillConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.transport.base import NotUsable, ReceiveSide
from pd_grpc.transport.registry import find
from pd_grpc.v1 import layout_pb2

EPOCH = 1
_OWNER = Owner("kv-bench", 1)
SESSION = "kv-bench"


def left_out() -> dict[str, str]:
    """Transports that cannot be used here, and why."""
    found = {}
    for name, way in ways.TRANSPORTS.items():
        pool = KvPool(1, seed=None, shared=way.shared)
        try:
            find([name])[0].receive(ReceiveSide(LAYOUT, pool.memory))
        except NotUsable as error:
            found[name] = str(error)
    return found


class Landing:
    """D's shard. The transfers are granted by hand, as D's machine would."""

    def __init__(self, lands: bool, transport: str = "inline") -> None:
        self.lands = lands
        self._kind = find([transport])[0]
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def start(self, pool: KvPool, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        self._loop = asyncio.get_running_loop()
        config = DecodeConfig(**settings)
        half = self._kind.receive(ReceiveSide(LAYOUT, pool.memory))
        receiver = Receiver(config, LAYOUT, pool.memory, EPOCH, {self._kind.value: half})
        self._server = BulkServer(config, receiver, SystemClock(), transports=[half])
        self._server.listeners.append(self._hear)
        await asyncio.to_thread(self._server.start)
        self._server.post(act.AdmitSession(_OWNER, SESSION))
        return {"endpoint": self._server.endpoint, "metadata": half.metadata().hex()}

    async def expect(self, names: Sequence[str], tables: Tables) -> None:
        for name, table in zip(names, tables, strict=True):
            self._waiting[name] = self._loop.create_future()
            key = TransferKey(name, 1)
            wanted = ((0, len(table)),)
            grant = name, key, _OWNER, tuple(table), wanted
            self._server.post(act.OpenReceive(*grant, self._kind.value))

    async def landed(self) -> None:
        try:
            await asyncio.wait_for(asyncio.gather(*self._waiting.values()), LIMIT_S)
        finally:
            over = Fault(Reason.SUPERSEDED, "the leg is over")
            for name in self._waiting:
                self._server.post(act.CloseReceive(name, over))
            self._waiting.clear()

    async def stop(self) -> None:
        await asyncio.to_thread(self._server.stop)

    def _hear(self, event: decode_ev.Event) -> None:
        """On the bulk thread."""
        if isinstance(event, decode_ev.ReceiveCompleted):
            self._loop.call_soon_threadsafe(self._settle, event.grant_id, None)
        elif isinstance(event, decode_ev.ReceiveFailed):
            self._loop.call_soon_threadsafe(self._settle, event.grant_id, event.fault)

    def _settle(self, name: str, fault: Fault | None) -> None:
        waiting = self._waiting.get(name)
        if waiting is None or waiting.done():
            return
        if fault is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(RuntimeError(f"{self._kind.name}: {fault}"))


class Sending(ways.Sending):
    """P's bulk side, every layer of every transfer computed from the start."""

    def __init__(self, transport: str = "inline") -> None:
        self._transport = transport
        self._pusher: Pusher | None = None

    async def start(
        self, pool: KvPool, settings: Mapping[str, Any], address: Mapping[str, Any]
    ) -> None:
        self._endpoint = address["endpoint"]
        self._pusher = Pusher(LAYOUT, pool.memory, PrefillConfig(**settings), self._transport)
        metadata = bytes.fromhex(address["metadata"])
        shard = layout_pb2.Shard(endpoint=self._endpoint, transport_metadata=metadata)
        await self._pusher.reach([shard])

    async def send(self, names: Sequence[str], tables: Tables) -> list[float]:
        assert self._pusher is not None
        began = time.perf_counter()
        pushes = [
            self._pusher.push(TransferKey(name, 1), self._endpoint, SESSION, name, EPOCH, table)
            for name, table in zip(names, tables, strict=True)
        ]
        return [end - began for end in await asyncio.gather(*pushes)]

    async def stop(self) -> None:
        if self._pusher is not None:
            await asyncio.to_thread(self._pusher.stop)
