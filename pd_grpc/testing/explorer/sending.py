"""The bulk side of a P of the world: the real sender, and what its shell does with streams."""

from __future__ import annotations

from typing import Any

from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.sender import TransferSender
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.testing.explorer.engine_process import EngineProcess
from pd_grpc.testing.explorer.kv import LAYOUT
from pd_grpc.testing.explorer.process import server_of
from pd_grpc.testing.explorer.wire import BROKEN, END, Interned, Message
from pd_grpc.transport.base import Slab
from pd_grpc.transport.chunk_codec import checksum
from pd_grpc.v1 import transfer_pb2


class Sending:
    """One transfer to one shard, over as many streams as it takes."""

    def __init__(self, action: act.OpenTransfer, chunk_bytes: int) -> None:
        self.sender = TransferSender(LAYOUT, action.plan, chunk_bytes, action.progress_s)
        self.call: int | None = None
        self.streams = 0


class SendingProcess(EngineProcess):
    """What of a P sends KV. It hears what the control loop posts, and posts what comes of it."""

    def __init__(
        self, name: str, epoch: int, ids: Interned, config: PrefillConfig, fine: bool
    ) -> None:
        super().__init__(name, epoch, ids, config.num_blocks, fine, shared=config.prefix_cache > 0)
        self.config = config
        self.sendings: dict[tuple[TransferKey, int], Sending] = {}

    def _bulk(self, what: Any) -> None:
        if isinstance(what, act.OpenTransfer):
            self._open_stream(what)
        elif isinstance(what, act.CloseTransfer):
            sending = self.sendings.pop((what.key, what.shard), None)
            if sending is not None and sending.call is not None:
                self._cancel(sending.call)
            self.news.append(ev.TransferClosed(what.key, what.shard))
        else:
            for key, tokens in what:
                for (other, shard), sending in self.sendings.items():
                    if other == key:
                        sending.sender.advance(0, 0, tokens)
                        self._pump(key, shard, sending)

    def _open_stream(self, action: act.OpenTransfer) -> None:
        sending = self.sendings.get((action.key, action.shard))
        if sending is None:
            sending = Sending(action, self.config.chunk_bytes)
            self.sendings[action.key, action.shard] = sending
        sending.sender.opening(self.now)
        sending.streams += 1
        name = f"{action.key}/{action.shard}/{sending.streams}"
        request = transfer_pb2.TransferRequest(open=action.open)
        server = server_of(action.endpoint)
        sending.call = self._open("transfer", server, name, "transfer", request)

    def _pump(self, key: TransferKey, shard: int, sending: Sending) -> None:
        sender = sending.sender
        if sending.call is None:
            return
        while (slab := sender.next_slab(self.now)) is not None:
            table = sender.plan.block_table
            pieces = self.memory.read(table[slab.block : slab.block + slab.blocks], 0, 0, 1)
            tokens = min(sender.plan.tokens, (slab.block + slab.blocks) * LAYOUT.block_size)
            self.memory.tokens(table, tokens, key)
            header = transfer_pb2.KvChunk(
                group=slab.group,
                layer_start=slab.layer,
                layer_count=slab.layers,
                block_start=slab.block,
                block_count=slab.blocks,
                crc32c=checksum(pieces),
            )
            self._up(sending.call, "chunk", (header, b"".join(pieces)))
        end = sender.end(self.now)
        if end is not None:
            said = transfer_pb2.TransferEnd(chunks=end[0], bytes=end[1])
            self._up(sending.call, "transfer", transfer_pb2.TransferRequest(end=said))

    def _stream(self, call: int, message: Message) -> None:
        for (key, shard), sending in list(self.sendings.items()):
            if sending.call == call:
                self._hear(key, shard, sending, message)
                return

    def _hear(self, key: TransferKey, shard: int, sending: Sending, message: Message) -> None:
        sender = sending.sender
        if message.kind in (END, BROKEN):
            early = TransportFault(Code.UNAVAILABLE, "the stream ended before it was complete")
            self._stream_broken(key, shard, sending, message.body or early)
            return
        response = message.body
        kind = response.WhichOneof("message")
        if kind == "completed":
            if sender.completed():
                del self.sendings[key, shard]
                self.news.append(ev.TransferCompleted(key, shard))
            else:
                self._stream_broken(key, shard, sending, Fault(Reason.WRONG_STATE, "too early"))
            return
        if kind == "opened":
            news = sender.opened(
                _slabs(response.opened.verified), response.opened.window_bytes, self.now
            )
        else:
            news = _slabs(response.ack.ranges)
            sender.acked(news, response.ack.accepted_bytes, self.now)
        if news or kind == "ack":
            self.news.append(ev.KvAcked(key, shard, news, sender.acked_bytes))
        elif sending.streams > 1:
            self.news.append(ev.TransferReopened(key, shard))
        self._pump(key, shard, sending)

    def _stream_broken(
        self, key: TransferKey, shard: int, sending: Sending, fault: Fault | TransportFault
    ) -> None:
        sending.call = None
        sending.sender.broken()
        self.news.append(ev.TransferBroken(key, shard, fault))


def _slabs(ranges: Any) -> list[Slab]:
    return [
        Slab(r.group, r.layer_start, r.layer_count, r.block_start, r.block_count) for r in ranges
    ]
