"""P's bulk side: every Transfer stream, on a thread and an event loop of its own.

The engine thread posts which layer is ready, the control loop which transfer is opened or closed;
both are carried out here in the order they were posted. What becomes of a transfer goes back to the
control loop as events.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from pd_grpc.prefill import events as ev
from pd_grpc.prefill.actions import OpenTransfer
from pd_grpc.prefill.pair_window import PairWindow
from pd_grpc.prefill.sender import TransferSender
from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault
from pd_grpc.protocol.layout import KvLayout
from pd_grpc.protocol.messages import plain_transport
from pd_grpc.protocol.posting import post
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.unforeseen import defect
from pd_grpc.telemetry.instance_log import InstanceLog
from pd_grpc.telemetry.log_events import Event
from pd_grpc.transport.base import SendStream, SendTransport, Slab
from pd_grpc.v1 import decode_pb2

Report = Callable[[ev.Event], None]
Metadata = Sequence[tuple[str, str]]


class BulkSender:
    """Owns the bulk thread. Its methods may be called from any thread and return at once, but
    `start` and `stop`."""

    def __init__(
        self,
        layout: KvLayout,
        ranks: Sequence[Mapping[int, SendTransport]],
        chunk_bytes: int,
        clock: Clock,
        report: Report,
        log: InstanceLog | None = None,
    ) -> None:
        """`ranks` are the transports of each of P's shards, by their value on the wire; `report` is
        called on the bulk thread."""
        self._layout = layout
        self._ranks = ranks
        self._chunk_bytes = chunk_bytes
        self._clock = clock
        self._report = report
        self._log = log or InstanceLog("prefill", "")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="pd-bulk", daemon=True)
        self._transfers: dict[TransferKey, dict[int, _Transfer]] = {}
        self._windows: WeakValueDictionary[int, PairWindow] = WeakValueDictionary()
        """By the process of D; each is its transfers' to keep."""
        self._retiring: set[_Transfer] = set()
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def open(self, action: OpenTransfer, metadata: Metadata) -> None:
        """Open a transfer's stream, for the first time or again."""
        self._post(self._open, action, metadata)

    def layer_ready(
        self, computed: Sequence[tuple[TransferKey, int]], group: int, layer: int
    ) -> None:
        """The KV of one layer is in the pool, of each request up to so many tokens."""
        self._post(self._layer_ready, computed, group, layer)

    def close(self, key: TransferKey, strand: int) -> None:
        """Stop a transfer; reported as TransferClosed."""
        self._post(self._close, key, strand)

    def forget(self, endpoint: str) -> None:
        """Nothing more goes to a shard."""
        for transport in self._every_transport():
            self._post(transport.forget, endpoint)

    async def reach(self, welcome: decode_pb2.Welcome) -> None:
        """Get ready to send by the transport that a D has chosen. Unreachable when that cannot be;
        from any loop."""
        for transports in self._ranks:
            transport = transports.get(plain_transport(welcome.transport))
            if transport is not None:
                ready = transport.reach(welcome.shards, welcome.instance)
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ready, self._loop))

    def stop(self) -> None:
        """End every stream and the thread. Blocks until both are gone."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # --- on the bulk loop ----------------------------------------------------------------------

    def _open(self, action: OpenTransfer, metadata: Metadata) -> None:
        strands = self._transfers.setdefault(action.key, {})
        transfer = strands.get(action.strand)
        if transfer is None:
            transport = self._ranks[action.sender][plain_transport(action.open.transport)]
            sender = TransferSender(
                self._layout,
                action.plan,
                transport.least_bytes(self._chunk_bytes),
                action.progress_s,
                transport.slab_bytes(self._chunk_bytes),
            )
            transfer = strands[action.strand] = _Transfer(
                action.key,
                action.strand,
                sender,
                self._ranks[action.sender],
                self._clock,
                self._tell,
                self._log,
            )
        window = self._windows.setdefault(action.open.ref.decode_epoch, PairWindow())
        transfer.open(action, metadata, window)

    def _layer_ready(
        self, computed: Sequence[tuple[TransferKey, int]], group: int, layer: int
    ) -> None:
        for key, tokens in computed:
            for transfer in self._transfers.get(key, {}).values():
                transfer.advance(group, layer, tokens)

    def _close(self, key: TransferKey, strand: int) -> None:
        transfer = self._drop(key, strand)
        if transfer is None:
            self._report(ev.TransferClosed(key, strand))
        else:
            self._spawn(self._end(transfer, key, strand))

    async def _end(self, transfer: _Transfer, key: TransferKey, strand: int) -> None:
        stopped = await transfer.close()
        self._report(ev.TransferClosed(key, strand, stopped))

    def _tell(self, event: ev.Event) -> None:
        if isinstance(event, ev.TransferCompleted):
            transfer = self._drop(event.key, event.strand)
            if transfer is not None:
                self._spawn(self._retire(transfer))
        self._report(event)

    async def _retire(self, transfer: _Transfer) -> None:
        self._retiring.add(transfer)
        await transfer.retire()
        self._retiring.discard(transfer)

    def _drop(self, key: TransferKey, strand: int) -> _Transfer | None:
        strands = self._transfers.get(key, {})
        transfer = strands.pop(strand, None)
        if not strands:
            self._transfers.pop(key, None)
        return transfer

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task: asyncio.Task[object] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop(self) -> None:
        for key, strands in list(self._transfers.items()):
            for strand in list(strands):
                self._close(key, strand)
        for transfer in self._retiring:
            self._spawn(transfer.close())
        while self._tasks:
            await asyncio.wait(list(self._tasks))
        for transport in self._every_transport():
            await transport.stop()

    def _every_transport(self) -> list[SendTransport]:
        return [transport for rank in self._ranks for transport in rank.values()]

    def _post(self, function: Callable[..., object], *args: Any) -> None:
        post(self._loop, function, *args)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


class _Transfer:
    """One strand of a transfer, over as many streams as it takes. Hears its streams."""

    def __init__(
        self,
        key: TransferKey,
        strand: int,
        sender: TransferSender,
        transports: Mapping[int, SendTransport],
        clock: Clock,
        tell: Report,
        log: InstanceLog,
    ) -> None:
        self._key = key
        self._strand = strand
        self._sender = sender
        self._transports = transports
        self._clock = clock
        self._tell = tell
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._more = asyncio.Event()
        self._stream: SendStream | None = None
        self._pump: asyncio.Task[None] | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._streams = 0
        self._window = PairWindow()
        self._leftovers: set[asyncio.Task[None]] = set()
        self._stopped = True
        """As for `SendStream.close`, of the streams that have ended."""

    def open(self, action: OpenTransfer, metadata: Metadata, window: PairWindow) -> None:
        """Begin a stream."""
        self._streams += 1
        self._window = window
        connection = action.sender, action.endpoint
        window.join(self._sender, self._more.set, connection)
        self._sender.opening(self._clock.now())
        transport = self._transports[plain_transport(action.open.transport)]
        self._stream = transport.open(
            action.endpoint, action.open, self, action.timeout_s, metadata
        )
        self._more.clear()
        self._pump = self._loop.create_task(self._send(self._stream, connection))
        self._pump.add_done_callback(self._pumped)
        self._watch()

    def advance(self, group: int, layer: int, tokens: int) -> None:
        """More of a layer is in the pool."""
        self._sender.advance(group, layer, tokens)
        self._more.set()

    async def close(self) -> bool:
        """Stop sending; when it returns P's memory is not read any more. Whether all of its streams
        have stopped, as for `SendStream.close`."""
        self._window.leave(self._sender)
        self._unwatch()
        if self._stream is not None:
            await self._close(self._stream)
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])
        if self._leftovers:
            await asyncio.wait(list(self._leftovers))
        return self._stopped

    async def _close(self, stream: SendStream) -> None:
        if not await stream.close():
            self._stopped = False

    async def retire(self) -> None:
        """Everything has been sent and acknowledged: D ends the stream."""
        self._unwatch()
        if self._stream is not None:
            await self._stream.finished()
        await self.close()

    # What the stream says.

    def opened(self, verified: Sequence[Slab], window_bytes: int) -> None:
        news = self._sender.opened(verified, window_bytes, self._clock.now())
        self._watch()
        self._more.set()
        if news:
            self._tell(ev.KvAcked(self._key, self._strand, news, self._sender.acked_bytes))
        elif self._streams > 1:
            self._tell(ev.TransferReopened(self._key, self._strand))

    def acked(self, ranges: Sequence[Slab], accepted_bytes: int) -> None:
        self._sender.acked(ranges, accepted_bytes, self._clock.now())
        self._watch()
        self._window.acked()
        self._tell(ev.KvAcked(self._key, self._strand, ranges, self._sender.acked_bytes))

    def completed(self) -> None:
        if self._sender.completed():
            self._tell(ev.TransferCompleted(self._key, self._strand))
            return
        text = "the shard says that it has everything before everything was sent"
        self.broken(Fault(Reason.WRONG_STATE, text, {"state": "completed"}))

    def broken(self, fault: Fault | TransportFault, stopped: bool = True) -> None:
        self._stopped = self._stopped and stopped
        self._sender.broken()
        self._window.leave(self._sender)
        self._unwatch()
        if self._pump is not None:
            self._pump.cancel()
        self._tell(ev.TransferBroken(self._key, self._strand, fault, stopped))

    async def _send(self, stream: SendStream, connection: Hashable) -> None:
        if self._leftovers:
            # Of an earlier stream: what it still wrote would land under the end of this one.
            await asyncio.wait(list(self._leftovers))
        while True:
            await self._more.wait()
            self._more.clear()
            while self._window.has_room(self._sender):
                async with self._window.turn(connection) as turn:
                    slab = self._next_slab()
                    if slab is None:
                        break
                    while slab is not None:
                        if not await stream.write(slab, self._blocks_of(slab)):
                            return
                        slab = self._next_slab() if turn.wrote() else None
            end = self._sender.end(self._clock.now())
            if end is not None:
                self._watch()
                await stream.end(*end)
                return

    def _blocks_of(self, slab: Slab) -> Sequence[int]:
        return self._sender.plan.block_table[slab.block : slab.block + slab.blocks]

    def _next_slab(self) -> Slab | None:
        """What to send now that it is this transfer's turn; there may be no room any more."""
        if not self._window.has_room(self._sender):
            return None
        most_bytes = self._window.most_bytes(self._sender)
        slab = self._sender.next_slab(self._clock.now(), most_bytes)
        if slab is not None:
            self._window.sent(self._sender)
            self._watch()
        return slab

    def _watch(self) -> None:
        """Wake when the shard will have been silent too long. A timer that runs already stays: the
        deadline only moves on, and when the timer is over it is looked at again."""
        at = self._sender.deadline()
        if at is None:
            self._unwatch()
        elif self._stall is None:
            delay = max(0.0, at - self._clock.now())
            self._stall = self._loop.call_later(delay, self._stalled)

    def _unwatch(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _stalled(self) -> None:
        self._stall = None
        at = self._sender.deadline()
        if at is None or at > self._clock.now():
            self._watch()
            return
        self._abandon(TransportFault(Code.DEADLINE_EXCEEDED, "the shard acknowledged nothing"))

    def _pumped(self, pump: asyncio.Task[None]) -> None:
        """What cannot be read cannot be sent: the shard would wait for it in vain."""
        error = None if pump.cancelled() else pump.exception()
        if isinstance(error, Fault):
            self._abandon(error)
        elif error is not None:
            transfer_id, attempt = self._key
            self._log.note(
                Event.DEFECT,
                "sending KV failed",
                error=error,
                transfer_id=transfer_id,
                attempt=attempt,
            )
            self._abandon(defect(error, "KV could not be sent"))

    def _abandon(self, fault: Fault | TransportFault) -> None:
        """End the stream from here."""
        if self._stream is not None:
            closing = self._loop.create_task(self._close(self._stream))
            self._leftovers.add(closing)
            closing.add_done_callback(self._leftovers.discard)
        self.broken(fault)
