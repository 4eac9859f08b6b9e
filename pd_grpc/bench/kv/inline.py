"""Moving KV as the servers do by `inline`: P's bulk side and D's, between pools."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pd_grpc.bench.kv.pool import LAYERS, LAYOUT, KvPool
from pd_grpc.bench.kv.ways import Tables
from pd_grpc.decode import actions as act
from pd_grpc.decode import events as decode_ev
from pd_grpc.decode.bulk import BulkServer
from pd_grpc.decode.receiver import Receiver
from pd_grpc.decode.transfer import Owner
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.actions import OpenTransfer
from pd_grpc.prefill.bulk import BulkSender
from pd_grpc.protocol import rpc
from pd_grpc.protocol.clock import SystemClock
from pd_grpc.protocol.config import DecodeConfig, PrefillConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.transport.base import LayerRun, SendPlan
from pd_grpc.transport.inline_sender import InlineTransport
from pd_grpc.v1 import transfer_pb2, types_pb2

_LIMIT_S = 60.0
_EPOCH = 1
_OWNER = Owner("kv-bench", 1)
_SESSION = "kv-bench"


class Landing:
    """D's shard. The transfers are granted by hand, as D's machine would."""

    def __init__(self, lands: bool) -> None:
        self.lands = lands
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def start(self, pool: KvPool, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        self._loop = asyncio.get_running_loop()
        config = DecodeConfig(**settings)
        receiver = Receiver(config, LAYOUT, pool.memory, _EPOCH)
        self._server = BulkServer(config, receiver, SystemClock())
        self._server.listeners.append(self._hear)
        await asyncio.to_thread(self._server.start)
        self._server.post(act.AdmitSession(_OWNER, _SESSION))
        return {"endpoint": self._server.endpoint}

    async def expect(self, names: Sequence[str], tables: Tables) -> None:
        for name, table in zip(names, tables, strict=True):
            self._waiting[name] = self._loop.create_future()
            key = TransferKey(name, 1)
            self._server.post(act.OpenReceive(name, key, _OWNER, tuple(table), len(table)))

    async def landed(self) -> None:
        try:
            await asyncio.wait_for(asyncio.gather(*self._waiting.values()), _LIMIT_S)
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
            waiting.set_exception(RuntimeError(f"inline: {fault}"))


class Sending:
    """P's bulk side, every layer of every transfer computed from the start."""

    def __init__(self) -> None:
        self._waiting: dict[TransferKey, asyncio.Future[float]] = {}
        self._bulk: BulkSender | None = None

    async def start(
        self, pool: KvPool, settings: Mapping[str, Any], address: Mapping[str, Any]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._endpoint = address["endpoint"]
        config = PrefillConfig(**settings)
        channel = partial(rpc.aio_channel, timeouts=config, sizes=config)
        transport = InlineTransport(pool.memory, channel)
        self._bulk = BulkSender(
            LAYOUT, transport, config.chunk_bytes, SystemClock(), self._report
        )
        self._bulk.start()

    async def send(self, names: Sequence[str], tables: Tables) -> list[float]:
        assert self._bulk is not None
        began = time.perf_counter()
        for name, table in zip(names, tables, strict=True):
            key = TransferKey(name, 1)
            self._waiting[key] = self._loop.create_future()
            tokens = len(table) * LAYOUT.block_size
            plan = SendPlan(
                tokens, tuple(table), ((0, len(table)),), (LayerRun(0, 0, LAYERS),)
            )
            message = transfer_pb2.TransferOpen(
                session_id=_SESSION,
                grant_id=name,
                ref=types_pb2.TransferRef(transfer_id=name, attempt=1, decode_epoch=_EPOCH),
            )
            self._bulk.open(
                OpenTransfer(key, 0, "d", self._endpoint, message, plan, _LIMIT_S, _LIMIT_S), ()
            )
            for layer in range(LAYERS):
                self._bulk.layer_ready([(key, tokens)], 0, layer)
        try:
            ends = await asyncio.wait_for(asyncio.gather(*self._waiting.values()), _LIMIT_S)
        finally:
            self._waiting.clear()
        return [end - began for end in ends]

    async def stop(self) -> None:
        if self._bulk is not None:
            await asyncio.to_thread(self._bulk.stop)

    def _report(self, event: ev.Event) -> None:
        """On the bulk thread."""
        if isinstance(event, ev.TransferCompleted | ev.TransferBroken):
            self._loop.call_soon_threadsafe(self._settle, event, time.perf_counter())

    def _settle(self, event: ev.TransferCompleted | ev.TransferBroken, at: float) -> None:
        waiting = self._waiting.get(event.key)
        if waiting is None or waiting.done():
            return
        if isinstance(event, ev.TransferCompleted):
            waiting.set_result(at)
        else:
            waiting.set_exception(RuntimeError(f"inline: {event.fault}"))
