"""P's bulk side with every layer computed: KV leaves as fast as it can."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from pd_grpc.engine.base import KvMemory
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.actions import OpenTransfer
from pd_grpc.prefill.bulk import BulkSender
from pd_grpc.protocol import rpc
from pd_grpc.protocol.clock import SystemClock
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.layout import KvLayout
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.transport.base import LayerRun, SendPlan, SendTransport
from pd_grpc.transport.inline import InlineTransport
from pd_grpc.v1 import layout_pb2, transfer_pb2, types_pb2

LIMIT_S = 60.0
"""Of one transfer."""


class Pusher:
    """To be used on the loop that makes it."""

    def __init__(self, layout: KvLayout, memory: KvMemory, config: PrefillConfig) -> None:
        self._layout = layout
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[TransferKey, asyncio.Future[float]] = {}
        inline = InlineTransport(memory, partial(rpc.aio_channel, timeouts=config, sizes=config))
        transports: dict[int, SendTransport] = {layout_pb2.TRANSPORT_INLINE: inline}
        self._bulk = BulkSender(layout, transports, config.chunk_bytes, SystemClock(), self._report)
        self._bulk.start()

    async def push(
        self,
        key: TransferKey,
        endpoint: str,
        session_id: str,
        grant_id: str,
        decode_epoch: int,
        blocks: Sequence[int],
    ) -> float:
        """Send all of `blocks` for a grant; the `time.perf_counter` at which D had them.
        RuntimeError when it does not get them."""
        layers = [LayerRun(g, 0, group.layers) for g, group in enumerate(self._layout.groups)]
        tokens = len(blocks) * self._layout.block_size
        plan = SendPlan(tokens, tuple(blocks), ((0, len(blocks)),), tuple(layers))
        message = transfer_pb2.TransferOpen(
            session_id=session_id,
            grant_id=grant_id,
            ref=types_pb2.TransferRef(
                transfer_id=key.transfer_id, attempt=key.attempt, decode_epoch=decode_epoch
            ),
        )
        waiting = self._waiting[key] = self._loop.create_future()
        self._bulk.open(OpenTransfer(key, 0, "d", endpoint, message, plan, LIMIT_S, LIMIT_S), ())
        for run in layers:
            for layer in range(run.layers):
                self._bulk.layer_ready([(key, tokens)], run.group, layer)
        try:
            return await asyncio.wait_for(waiting, LIMIT_S)
        finally:
            del self._waiting[key]
            if not waiting.done() or waiting.cancelled():
                self._bulk.close(key, 0)

    def stop(self) -> None:
        """End every stream. Blocks."""
        self._bulk.stop()

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
