"""The bulk side of a P of the world: the real sender, and what its shell does with streams."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.sender import TransferSender
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault
from pd_grpc.protocol.layout import KvLayout
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.testing.explorer.borrowing import (
    SHM,
    Attachment,
    Handshake,
    Reached,
    Write,
    WriteInto,
    still_to_write,
    target_of,
)
from pd_grpc.testing.explorer.engine_process import EngineProcess
from pd_grpc.testing.explorer.kv import BLOCK, UNCUT, Cut
from pd_grpc.testing.explorer.lending import pool_id
from pd_grpc.testing.explorer.process import server_of, shard_name
from pd_grpc.testing.explorer.wire import BROKEN, END, LEND, Interned, Message
from pd_grpc.transport.base import Slab
from pd_grpc.transport.chunk_codec import checksum
from pd_grpc.transport.chunks import chunk_of
from pd_grpc.v1 import transfer_pb2


class Heard(NamedTuple):
    """What came for the bulk loop while it was busy."""

    call: int
    message: Message


class Sending:
    """One transfer to one shard, over as many streams as it takes."""

    def __init__(self, action: act.OpenTransfer, layout: KvLayout, chunk_bytes: int) -> None:
        self.sender = TransferSender(layout, action.plan, chunk_bytes, action.progress_s)
        sends = action.open.sends
        self.heads = (sends.head_start, sends.head_count) if sends.head_count else None
        """The first and how many of P's heads go over it; None is all."""
        self.call: int | None = None
        self.streams = 0
        self.grant_id = action.open.grant_id
        self.writes = False
        """Whether P itself writes, on this stream, to the memory that it has by `attachment`."""
        self.attachment: Attachment | None = None
        self.target: Mapping[int, int] = {}
        """Where in D's memory each logical block goes."""
        self.audited = False

    def ended(self) -> None:
        """Its stream is gone."""
        self.call = self.attachment = None
        self.target = {}


class SendingProcess(EngineProcess):
    """What of a P sends KV. It hears what the control loop posts, and posts what comes of it."""

    def __init__(
        self,
        name: str,
        epoch: int,
        ids: Interned,
        config: PrefillConfig,
        fine: bool,
        known_as: tuple[str, int],
        cut: Cut = UNCUT,
    ) -> None:
        """`known_as` are its name and epoch, as Ds have them."""
        shared = config.prefix_cache > 0
        super().__init__(name, epoch, ids, config.num_blocks, fine, shared, cut=cut)
        self.config = config
        self.known_as = known_as
        self.sendings: dict[tuple[TransferKey, int], Sending] = {}
        self.write: Write | None = None
        self.attachments: dict[str, Attachment] = {}
        self.returning: list[Attachment] = []
        """Those that are wanted no more, and that streams still write to."""
        self.handshakes: dict[int, Handshake] = {}

    def writes(self) -> frozenset[tuple[str, int, str, int]]:
        """Every block of a D that it may write to, now or later: the D, its epoch, the grant in
        whose name, and the block."""
        found = set()
        for (key, shard), sending in self.sendings.items():
            attachment = sending.attachment
            if attachment is None or sending.call is None:
                continue
            blocks = set(still_to_write(sending))
            write = self.write
            if write is not None and (write.key, write.shard) == (key, shard):
                blocks |= set(range(write.slab.block, write.slab.block + write.slab.blocks))
            server = self._ids.calls[attachment.call].server
            for block in blocks & sending.target.keys():
                place = sending.target[block]
                found.add((server, attachment.epoch, sending.grant_id, place))
        return frozenset(found)

    def _posted(self) -> list[str]:
        posted = super()._posted()
        return posted if self.write is None else [step for step in posted if step != "bulk"]

    def _bulk(self, what: Any) -> None:
        if isinstance(what, act.OpenTransfer):
            self._open_stream(what)
        elif isinstance(what, act.CloseTransfer):
            sending = self.sendings.pop((what.key, what.strand), None)
            if sending is not None and sending.call is not None:
                self._cancel(sending.call)
            self.news.append(ev.TransferClosed(what.key, what.strand))
            self._settle_attachments()
        elif isinstance(what, act.ForgetDecode):
            self._let_go(server_of(what.endpoint))
        elif isinstance(what, Handshake):
            self._reach(what)
        elif isinstance(what, Heard):
            self._stream(*what)
        else:
            for key, tokens in what:
                for (other, shard), sending in self.sendings.items():
                    if other == key:
                        sending.sender.advance(0, 0, tokens)
                        self._pump(key, shard, sending)

    def _open_stream(self, action: act.OpenTransfer) -> None:
        sending = self.sendings.get((action.key, action.strand))
        if sending is None:
            sending = Sending(action, self.cut.layout, self.config.chunk_bytes)
            self.sendings[action.key, action.strand] = sending
        sending.sender.opening(self.now)
        sending.streams += 1
        sending.ended()
        server = server_of(action.endpoint)
        sending.writes = action.open.transport == SHM
        if sending.writes:
            sending.attachment = self.attachments.get(server)
        shard = shard_name(action.endpoint)
        name = f"{action.key}/{action.strand}/{sending.streams}{shard}"
        request = transfer_pb2.TransferRequest(open=action.open)
        sending.call = self._open("transfer", server, name, "transfer", request)

    def _pump(self, key: TransferKey, shard: int, sending: Sending) -> None:
        sender = sending.sender
        if sending.call is None or self.write is not None:
            return
        while (slab := sender.next_slab(self.now)) is not None:
            if sending.writes:
                self.write = Write(key, shard, slab)
                return
            pieces = self._read(key, sending, slab)
            header = chunk_of(slab, checksum(pieces), sending.heads)
            self._up(sending.call, "chunk", (header, b"".join(pieces)))
        end = sender.end(self.now)
        if end is not None:
            said = transfer_pb2.TransferEnd(chunks=end[0], bytes=end[1])
            self._up(sending.call, "transfer", transfer_pb2.TransferRequest(end=said))

    def _read(self, key: TransferKey, sending: Sending, slab: Slab) -> list[memoryview]:
        """A slab of P's memory, which must be what it is to be."""
        plan = sending.sender.plan
        blocks = plan.block_table[slab.block : slab.block + slab.blocks]
        pieces = self.memory.read(blocks, 0, 0, 1, sending.heads)
        tokens = min(plan.tokens, (slab.block + slab.blocks) * BLOCK)
        self.memory.tokens(plan.block_table, tokens, key)
        return pieces

    def _land(self) -> None:
        """The write that is under way is done, and its chunk says so."""
        write, self.write = self.write, None
        assert write is not None
        sending, slab = self.sendings[write.key, write.shard], write.slab
        attachment = sending.attachment
        assert attachment is not None and sending.call is not None
        pieces = self._read(write.key, sending, slab)
        places = tuple(sending.target[slab.block + i] for i in range(slab.blocks))
        into = WriteInto(attachment.epoch, sending.grant_id, places, b"".join(pieces))
        self._write(attachment.call, into)
        header = chunk_of(slab, checksum(pieces) if sending.audited else 0)
        header.descriptor.kind = SHM
        header.descriptor.handle = pool_id(attachment.epoch)
        self._up(sending.call, "chunk", (header, b""))
        self._pump(write.key, write.shard, sending)

    def _stream(self, call: int, message: Message) -> None:
        if self.write is not None:
            self.to_bulk.append(Heard(call, message))
            return
        if self._ids.calls[call].kind == LEND:
            self._lent(call, message)
            return
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
                self._settle_attachments()
                self.news.append(ev.TransferCompleted(key, shard))
            else:
                self._stream_broken(key, shard, sending, Fault(Reason.WRONG_STATE, "too early"))
            return
        if kind == "opened":
            if sending.writes and not self._take_target(key, shard, sending, response.opened):
                return
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

    def _take_target(
        self,
        key: TransferKey,
        shard: int,
        sending: Sending,
        opened: transfer_pb2.TransferOpened,
    ) -> bool:
        if sending.attachment is None:
            assert sending.call is not None
            self._cancel(sending.call)
            fault = Fault(Reason.WRONG_STATE, "the shard's memory is not mapped here")
            self._stream_broken(key, shard, sending, fault)
            return False
        sending.target = target_of(opened)
        sending.audited = opened.audit
        return True

    def _stream_broken(
        self, key: TransferKey, shard: int, sending: Sending, fault: Fault | TransportFault
    ) -> None:
        sending.ended()
        sending.sender.broken()
        self._settle_attachments()
        self.news.append(ev.TransferBroken(key, shard, fault))

    # --- D's memory ------------------------------------------------------------------------------

    def _reach(self, wanted: Handshake) -> None:
        known = self.attachments.get(wanted.server)
        if not self._waits(wanted.session):
            return  # Nobody waits for it any more.
        if known is not None and known.epoch == wanted.epoch:
            self.news.append(Reached(wanted.session, True))
            return
        name, epoch = self.known_as
        call = self._open(LEND, wanted.server, "pool", "attach", (name, epoch, wanted.epoch))
        self.handshakes[call] = wanted

    @abstractmethod
    def _waits(self, session: int) -> bool:
        """Whether a session waits until D's memory is here."""

    def _lent(self, call: int, message: Message) -> None:
        wanted = self.handshakes.pop(call, None)
        if wanted is None:
            return  # It is not looked at once the memory is here.
        if message.kind != "pool":
            self.news.append(Reached(wanted.session, False))
            return
        self._let_go(wanted.server)
        self.attachments[wanted.server] = Attachment(call, wanted.epoch)
        self.news.append(Reached(wanted.session, True))

    def _give_up(self, session: int) -> None:
        """Nobody waits for D's memory any more: what comes of it is not mapped."""
        for call, wanted in list(self.handshakes.items()):
            if wanted.session == session:
                del self.handshakes[call]
                self._close(call)

    def _let_go(self, server: str) -> None:
        """A D's memory is not wanted any more."""
        attachment = self.attachments.pop(server, None)
        if attachment is not None:
            self.returning.append(attachment)
            self._settle_attachments()

    def _settle_attachments(self) -> None:
        held = [sending.attachment for sending in self.sendings.values()]
        for attachment in list(self.returning):
            if attachment not in held:
                self.returning.remove(attachment)
                self._close(attachment.call)


def _slabs(ranges: Any) -> list[Slab]:
    return [
        Slab(r.group, r.layer_start, r.layer_count, r.block_start, r.block_count) for r in ranges
    ]
