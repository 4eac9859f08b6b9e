"""P's bulk side with every layer computed: KV leaves as fast as it can."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from functools import partial

from pd_grpc.engine.base import KvMemory
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.actions import OpenTransfer
from pd_grpc.prefill.bulk import BulkSender
from pd_grpc.protocol import rpc
from pd_grpc.protocol.clock import SystemClock
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.layout import KvLayout
from pd_grpc.protocol.messages import plain_transport
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.transport.base import LayerRun, SendPlan, SendSide
from pd_grpc.transport.registry import find
from pd_grpc.v1 import decode_pb2, layout_pb2, transfer_pb2, types_pb2

LIMIT_S = 60.0
"""Of one transfer."""
_INSTANCE = types_pb2.Instance(name="kv-bench", epoch=1, role=types_pb2.ROLE_PREFILL)


class Pusher:
    """Sends by one transport. To be used on the loop that makes it."""

    def __init__(
        self,
        layout: KvLayout,
        memory: KvMemory,
        config: PrefillConfig,
        transport: str = "inline",
    ) -> None:
        self._layout = layout
        self._loop = asyncio.get_running_loop()
        self.waiting: dict[TransferKey, asyncio.Future[float]] = {}
        """What D has not got yet."""
        self._kind = find([transport])[0]
        channel = partial(rpc.aio_channel, timeouts=config, sizes=config)
        half = self._kind.send(SendSide(_INSTANCE, layout, memory, channel))
        ranks = [{self._kind.value: half}]
        self._bulk = BulkSender(layout, ranks, config.chunk_bytes, SystemClock(), self.report)
        self._bulk.start()

    async def reach(self, shards: Iterable[layout_pb2.Shard]) -> None:
        """Get ready to send to these shards. Unreachable."""
        transport = plain_transport(self._kind.value)
        await self._bulk.reach(decode_pb2.Welcome(transport=transport, shards=shards))

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
        plan = SendPlan(tokens, tuple(blocks), ((0, len(blocks)),), tuple(layers), ready=tokens)
        message = transfer_pb2.TransferOpen(
            session_id=session_id,
            grant_id=grant_id,
            transport=plain_transport(self._kind.value),
            ref=key.ref(decode_epoch),
        )
        waiting: asyncio.Future[float] = self._loop.create_future()
        self.waiting[key] = waiting
        self._bulk.open(OpenTransfer(key, 0, "d", endpoint, message, plan, LIMIT_S, LIMIT_S), ())
        try:
            # Python 3.11's `wait_for` swallows a cancellation that meets the end of what it waits
            # for, and whoever pushes without end would never hear of it.
            await asyncio.wait({waiting}, timeout=LIMIT_S)
        finally:
            del self.waiting[key]
            if not waiting.done():
                self._bulk.close(key, 0)
        if not waiting.done():
            raise RuntimeError(f"{self._kind.name}: nothing landed within {LIMIT_S:g} s")
        return waiting.result()

    def stop(self) -> None:
        """End every stream. Blocks."""
        self._bulk.stop()

    def report(self, event: ev.Event) -> None:
        """On the bulk thread."""
        if isinstance(event, ev.TransferCompleted | ev.TransferBroken):
            self._loop.call_soon_threadsafe(self._settle, event, time.perf_counter())

    def _settle(self, event: ev.TransferCompleted | ev.TransferBroken, at: float) -> None:
        waiting = self.waiting.get(event.key)
        if waiting is None or waiting.done():
            return
        if isinstance(event, ev.TransferCompleted):
            waiting.set_result(at)
        else:
            waiting.set_exception(RuntimeError(f"{self._kind.name}: {event.fault}"))
