"""What D's shard lets in: chunks in, checked against their grant and taken in by its transport,
acks out.

One table per shard, on the shard's own loop. It knows grants, not transfers: the machine opens and
closes them, and hears what comes of each. What D writes to the pool's memory it writes inside
`message`, so once a grant is closed D writes nothing for it any more; what a one-sided sender may
still write is the machine's to wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from zlib import crc32

from pd_grpc.decode import events as ev
from pd_grpc.decode.coverage import (
    LACKING,
    VERIFIED,
    Coverage,
    coverage,
    verified_ranges,
)
from pd_grpc.decode.incoming import Incoming, IncomingGrant
from pd_grpc.decode.session_ids import SessionIds
from pd_grpc.decode.transfer import Owner
from pd_grpc.decode.transfer_checks import (
    check_open,
    check_range,
    check_window,
    overlaps,
    range_bytes,
    wrong_transport,
)
from pd_grpc.engine.base import KvMemory
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Code, Fault, Reason, bad_request
from pd_grpc.protocol.layout import CANONICAL, KvLayout
from pd_grpc.protocol.messages import plain_transport
from pd_grpc.protocol.refs import TransferKey, key_of
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.protocol.shards import Part, Place, whole
from pd_grpc.protocol.timers import Timers
from pd_grpc.protocol.tombstones import Remembered
from pd_grpc.transport.base import ReceiveTransport
from pd_grpc.transport.chunk_codec import IncomingChunk, IncomingRequest
from pd_grpc.transport.inline import InlineReceive
from pd_grpc.v1 import layout_pb2, transfer_pb2

INLINE = layout_pb2.TRANSPORT_INLINE

CLOSED_REMEMBERED = 4096
"""Closed grants whose end a late stream is told; the machine's tombstones outlive them."""

HELD_STREAMS = 4096
"""Streams that may wait for the news of their grant."""


@dataclass(frozen=True)
class Respond:
    """Send to a stream."""

    stream: int
    message: transfer_pb2.TransferResponse


@dataclass(frozen=True)
class EndStream:
    """End a stream, with a fault or with OK."""

    stream: int
    fault: Fault | None


Action: TypeAlias = Respond | EndStream | ev.Event
"""Events are for D's machine."""


_Ranges: TypeAlias = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class _Wanted:
    """What a stream was opened for, and by whom."""

    key: TransferKey
    owner: Owner


@dataclass
class _Stream:
    grant_id: str = ""
    wanted: _Wanted | None = None
    open: transfer_pb2.TransferOpen = field(default_factory=transfer_pb2.TransferOpen)
    transport: int = INLINE
    incoming: Incoming | None = None
    """Once it has been answered."""
    taken: set[_Ranges] = field(default_factory=set)
    """The ranges of its chunks, and below what they cover."""
    covered: Coverage = field(default_factory=list)
    chunks: int = 0
    bytes: int = 0
    bytes_told: int = 0
    """Of `bytes`, those whose acknowledgement is on its way."""


class Receiver:
    """The grants of one shard and the streams that serve them. Every shard has all grants."""

    def __init__(
        self,
        config: DecodeConfig,
        layout: KvLayout,
        memory: KvMemory,
        decode_epoch: int,
        transports: Mapping[int, ReceiveTransport] | None = None,
        shard: int = 0,
        part: Part | None = None,
    ) -> None:
        """`transports` by their value on the wire; None is inline alone. `shard` is the index of
        this one among D's, `part` what it holds of the model; None is all of it."""
        self._shard = shard
        self._part = whole(layout) if part is None else part
        self._config = config
        self._layout = layout
        self._transports = transports or {INLINE: InlineReceive(memory)}
        self._as_stored = InlineReceive(memory.stored)
        """For streams whose bytes are in the format of the pool."""
        self._epoch = decode_epoch
        self._grants: dict[str, IncomingGrant] = {}
        self._streams: dict[int, _Stream] = {}
        self.sessions = SessionIds()
        self._held: dict[str, list[int]] = {}
        self._closed: Remembered[str, Fault] = Remembered(config.tombstone_s, CLOSED_REMEMBERED)
        self._timers: Timers[int] = Timers()

    def open_grant(
        self,
        grant_id: str,
        key: TransferKey,
        owner: Owner,
        blocks: Sequence[int],
        wanted: Sequence[tuple[int, int]],
        transport: int = INLINE,
        senders: Sequence[Place] = (),
        kv_format: str = CANONICAL,
    ) -> list[Action]:
        """Let KV in from the shards `senders` of `owner`, by `transport` or inline, in `kv_format`
        or canonical: of the logical blocks `blocks` the runs (start, count) `wanted`, all that this
        shard holds of them. No other block is written to, and no sender is told of another. No
        `senders` is one that holds everything."""
        end = max((start + count for start, count in wanted), default=0)
        grant = IncomingGrant(
            key,
            owner,
            tuple(blocks[:end]),
            tuple(wanted),
            tuple(senders),
            self._layout,
            self._part,
            transport,
            is_audited(grant_id, self._config.audit_every),
            kv_format,
        )
        self._grants[grant_id] = grant
        actions: list[Action] = []
        for stream in self._held.pop(grant_id, []):
            self._timers.cancel(stream)
            actions += self._attach(stream, grant_id, grant)
        return actions

    def close_grant(self, grant_id: str, fault: Fault, now: float) -> list[Action]:
        """Let no more in, and tell the streams why."""
        self._closed.add(grant_id, fault, now)
        actions: list[Action] = []
        grant = self._grants.pop(grant_id, None)
        for stream in () if grant is None else grant.streams():
            actions += self._end(stream, fault)
        return [*actions, ev.ReceiveClosed(grant_id, self._shard)]

    def stream_began(self, stream: int) -> None:
        """A Transfer call has come."""
        self._streams[stream] = _Stream()

    def stream_ended(self, stream: int) -> None:
        """A Transfer call is gone; without an end, the grant waits for another stream."""
        gone = self._streams.pop(stream, None)
        self._timers.cancel(stream)
        if gone is None:
            return
        if gone.incoming is not None and gone.incoming.stream == stream:
            gone.incoming.stream = None
        held = self._held.get(gone.grant_id)
        if held is not None and stream in held:
            held.remove(stream)
            if not held:
                del self._held[gone.grant_id]

    def message(self, stream: int, message: IncomingRequest, now: float) -> list[Action]:
        """A message of a stream."""
        state = self._streams.get(stream)
        if state is None:
            return []
        try:
            if isinstance(message, IncomingChunk):
                return self._chunk(stream, state, message.header, message.payload)
            kind = message.WhichOneof("message")
            if kind == "open":
                return self._open(stream, state, message.open, now)
            if kind == "end":
                return self._stream_end(stream, state, message.end)
            raise bad_request([FieldError("message", "must be open, chunk or end")])
        except Fault as fault:
            return self._fail(stream, state, fault)

    def acknowledged(self, stream: int, accepted_bytes: int) -> None:
        """An ack of a stream is on its way: the sender may hear of so many accepted bytes."""
        state = self._streams.get(stream)
        if state is not None:
            state.bytes_told = accepted_bytes

    def unreadable(self, stream: int, fault: Fault) -> list[Action]:
        """What comes on a stream cannot be taken in."""
        state = self._streams.get(stream)
        return [] if state is None else self._fail(stream, state, fault)

    def tick(self, now: float) -> list[Action]:
        """End the streams whose grant never came."""
        actions: list[Action] = []
        for stream in self._timers.pop_due(now):
            grant_id = self._streams[stream].grant_id
            fault = Fault(Reason.UNKNOWN_TRANSFER, f"grant {grant_id} is unknown here")
            actions += self._end(stream, fault)
        return actions

    def next_wake(self) -> float | None:
        """When `tick` must be called at the latest."""
        return self._timers.next()

    def _open(
        self, stream: int, state: _Stream, message: transfer_pb2.TransferOpen, now: float
    ) -> list[Action]:
        if state.wanted is not None:
            raise Fault(Reason.WRONG_STATE, "open came twice", {"state": "open"})
        check_open(message, self._epoch, self._shard, self._transports)
        state.open = message
        state.wanted = _Wanted(key_of(message.ref), self.sessions.owner_of(message.session_id))
        state.grant_id = message.grant_id
        state.transport = plain_transport(message.transport)
        closed = self._closed.get(message.grant_id, now)
        if closed is not None:
            return self._end(stream, closed)
        grant = self._grants.get(message.grant_id)
        if grant is None:
            if len(self._timers) >= HELD_STREAMS:
                text = f"{HELD_STREAMS} streams wait for the news of their grants already"
                raise Fault(Reason.QUEUE_FULL, text)
            # P may be faster than the news of its grant.
            self._held.setdefault(message.grant_id, []).append(stream)
            self._timers.set(stream, now + self._config.kv_progress_s)
            return []
        return self._attach(stream, message.grant_id, grant)

    def _attach(self, stream: int, grant_id: str, grant: IncomingGrant) -> list[Action]:
        state = self._streams[stream]
        assert state.wanted is not None
        if state.wanted != _Wanted(grant.key, grant.owner):
            whose = "transfer" if state.wanted.key != grant.key else "prefill"
            fault = Fault(Reason.NOT_OWNER, f"grant {grant_id} belongs to another {whose}")
            return self._end(stream, fault)
        if state.transport not in (INLINE, grant.transport):
            return self._end(stream, wrong_transport(state.transport))
        try:
            incoming = grant.opened(state.open)
        except Fault as fault:
            return self._end(stream, fault)
        actions: list[Action] = []
        if incoming.stream is not None:
            text = "a newer stream for the same grant took over"
            actions += self._end(incoming.stream, Fault(Reason.SUPERSEDED, text))
        incoming.stream = stream
        state.incoming = incoming
        state.covered = coverage(self._layout, incoming.part, len(grant.blocks), LACKING)
        # What was found in the prefix cache is no sender's target.
        runs = [(start, grant.blocks[start : start + count]) for start, count in grant.wanted]
        transport = self._transports[state.transport]
        target = transport.target(runs)
        opened = transfer_pb2.TransferOpened(
            verified=verified_ranges(incoming.verified),
            window_bytes=transport.window_bytes(self._config.send_window_bytes),
            target=target,
            audit=target is not None and grant.audited,
        )
        actions.append(Respond(stream, transfer_pb2.TransferResponse(opened=opened)))
        if not grant.sent_started:
            grant.sent_started = True
            actions.append(ev.ReceiveStarted(grant_id, self._shard))
        return actions

    def _chunk(
        self, stream: int, state: _Stream, chunk: transfer_pb2.KvChunk, payload: memoryview
    ) -> list[Action]:
        grant, incoming = self._grant_of(state)
        part = incoming.part
        check_range(chunk, payload.nbytes, self._layout, part, grant.wanted)
        size = range_bytes(chunk, self._layout, part)
        transport = self._transports[state.transport]
        if state.transport == INLINE and state.open.kv_format not in ("", CANONICAL):
            transport = self._as_stored
        window_bytes = transport.window_bytes(self._config.send_window_bytes)
        check_window(state.bytes - state.bytes_told, size, window_bytes)
        first, end = chunk.block_start, chunk.block_start + chunk.block_count
        rows = incoming.verified[chunk.group][chunk.layer_start :][: chunk.layer_count]
        lacking = sum(row.count(LACKING, first, end) for row in rows)
        ranges = chunk.group, chunk.layer_start, chunk.layer_count, first, chunk.block_count
        covered = state.covered[chunk.group][chunk.layer_start :][: chunk.layer_count]
        # What a stream has covered is verified: where all is lacking nothing can overlap.
        if (
            lacking != chunk.layer_count * chunk.block_count
            and ranges not in state.taken
            and any(row.find(VERIFIED, first, end) >= 0 for row in covered)
        ):
            raise overlaps(chunk)
        if part.heads != self._part.heads:
            chunk.head_start, chunk.head_count = part.head, part.heads
        # Once all of it is verified nothing is written again: D may be decoding from it.
        transport.land(
            chunk, payload, grant.blocks[first:end], fresh=lacking > 0, audited=grant.audited
        )
        state.taken.add(ranges)
        verified = bytes([VERIFIED]) * (end - first)
        for row in (*covered, *rows):
            row[first:end] = verified
        incoming.missing -= lacking
        state.chunks += 1
        state.bytes += size
        ack = transfer_pb2.TransferAck(accepted_bytes=state.bytes)
        ack.ranges.add(
            group=chunk.group,
            layer_start=chunk.layer_start,
            layer_count=chunk.layer_count,
            block_start=chunk.block_start,
            block_count=chunk.block_count,
        )
        actions: list[Action] = [Respond(stream, transfer_pb2.TransferResponse(ack=ack))]
        if lacking:
            actions.append(ev.ReceiveProgress(state.grant_id, size, self._shard))
        return actions

    def _stream_end(
        self, stream: int, state: _Stream, end: transfer_pb2.TransferEnd
    ) -> list[Action]:
        grant, incoming = self._grant_of(state)
        if (end.chunks, end.bytes) != (state.chunks, state.bytes):
            text = f"{state.chunks} chunks of {state.bytes} bytes came, {end.chunks} of {end.bytes}"
            raise bad_request([FieldError("end", f"{text} were announced")])
        complete = grant.end(incoming)
        completed = transfer_pb2.TransferCompleted(chunks=state.chunks, bytes=state.bytes)
        actions: list[Action] = [
            Respond(stream, transfer_pb2.TransferResponse(completed=completed))
        ]
        actions += self._end(stream, None)
        if complete and not grant.completed:
            grant.completed = True
            actions.append(ev.ReceiveCompleted(state.grant_id, self._shard))
        return actions

    def _grant_of(self, state: _Stream) -> tuple[IncomingGrant, Incoming]:
        grant = self._grants.get(state.grant_id)
        if state.incoming is None or grant is None:
            raise Fault(Reason.WRONG_STATE, "opened has not been answered", {"state": "open"})
        return grant, state.incoming

    def _fail(self, stream: int, state: _Stream, fault: Fault) -> list[Action]:
        """What P sent is wrong: its stream ends, and so does the transfer."""
        actions = self._end(stream, fault)
        if state.incoming is not None and state.grant_id in self._grants:
            code = Code.INTERNAL if fault.reason is Reason.BAD_REQUEST else None
            told = Fault(
                fault.reason,
                f"the KV transfer failed: {fault.message}",
                fault.metadata,
                mapped_code=code,
            )
            actions.append(ev.ReceiveFailed(state.grant_id, told, self._shard))
        return actions

    def _end(self, stream: int, fault: Fault | None) -> list[Action]:
        self.stream_ended(stream)
        return [EndStream(stream, fault)]


def is_audited(grant_id: str, every: int) -> bool:
    """Whether the bytes of a one-sided transfer are looked at: one grant in `every`, none for 0.
    Grant ids are random, so nobody can tell beforehand which."""
    return every > 0 and crc32(grant_id.encode()) % every == 0
