"""A receiver with one grant, without sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import google_crc32c

from pd_grpc.decode import events as ev
from pd_grpc.decode.receiver import Action, EndStream, Receiver, Respond
from pd_grpc.decode.transfer import Owner
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Fault
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.transport.chunk_codec import split_chunk
from pd_grpc.v1 import transfer_pb2, types_pb2

EPOCH = 5
KEY = TransferKey("t", 1)
OWNER = Owner("p", 10)
PLANES = (Plane(PlaneKind.K, "uint8", 1, 4), Plane(PlaneKind.V, "uint8", 1, 4))
LAYOUT = KvLayout(
    model="m",
    positions="p",
    block_size=2,
    groups=(KvGroup(GroupKind.FULL, 3, PLANES), KvGroup(GroupKind.FULL, 1, PLANES)),
)
LAYER = LAYOUT.layer_bytes(0)
TABLE = [6, 2, 4]
"""Physical blocks of the grant, logical order; the last one is not wanted."""
WANTED = 2


class Shard:
    """A receiver with one grant, and what came of it."""

    def __init__(self, grant: bool = True, window_bytes: int = 12345) -> None:
        self.buffer = bytearray(8 * LAYOUT.block_bytes)
        self.config = DecodeConfig(send_window_bytes=window_bytes)
        memory = HostKvMemory(self.buffer, LAYOUT)
        self.receiver = Receiver(self.config, LAYOUT, memory, EPOCH)
        self.receiver.sessions.admit(OWNER, "s")
        self.acks_leave = True
        """Whether the peer reads what it is told."""
        self.now = 100.0
        self.events: list[ev.Event] = []
        self.responses: dict[int, list[transfer_pb2.TransferResponse]] = {}
        self.ends: dict[int, Fault | None] = {}
        self.streams = 0
        if grant:
            self.grant()

    def grant(self) -> None:
        self.note(self.receiver.open_grant("g", KEY, OWNER, TABLE, [(0, WANTED)]))

    def close(self, fault: Fault) -> None:
        self.note(self.receiver.close_grant("g", fault, self.now))

    def stream(self, **fields: Any) -> int:
        """A stream begins and opens."""
        self.streams += 1
        self.receiver.stream_began(self.streams)
        self.responses[self.streams] = []
        ref = types_pb2.TransferRef(transfer_id="t", attempt=1, decode_epoch=EPOCH)
        message = transfer_pb2.TransferOpen(
            **{"session_id": "s", "ref": ref, "grant_id": "g", **fields}
        )
        self.send(self.streams, transfer_pb2.TransferRequest(open=message))
        return self.streams

    def chunk(
        self, stream: int, blocks: tuple[int, int], layers: tuple[int, int], **fields: Any
    ) -> bytes:
        """Blocks [start, count] of layers [start, count] of group 0, or of `group`."""
        payload = bytes(
            (7 * i + 31 * blocks[0] + 3 * layers[0]) % 256
            for i in range(blocks[1] * layers[1] * LAYER)
        )
        values = {
            "block_start": blocks[0],
            "block_count": blocks[1],
            "layer_start": layers[0],
            "layer_count": layers[1],
            "payload": payload,
            "crc32c": google_crc32c.value(payload),
        }
        message = transfer_pb2.KvChunk(**{**values, **fields})
        self.send(stream, transfer_pb2.TransferRequest(chunk=message))
        return payload

    def everything(self, stream: int) -> None:
        self.chunk(stream, (0, 2), (0, 3))
        self.chunk(stream, (0, 2), (0, 1), group=1)

    def end(self, stream: int, chunks: int, size: int) -> None:
        end = transfer_pb2.TransferEnd(chunks=chunks, bytes=size)
        self.send(stream, transfer_pb2.TransferRequest(end=end))

    def send(self, stream: int, message: transfer_pb2.TransferRequest) -> None:
        self.note(self.receiver.message(stream, split_chunk(message), self.now))

    def gone(self, stream: int) -> None:
        self.receiver.stream_ended(stream)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.note(self.receiver.tick(self.now))

    def note(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Respond):
                assert action.stream not in self.ends, "nothing follows the end"
                self.responses[action.stream].append(action.message)
                if self.acks_leave and action.message.HasField("ack"):
                    accepted = action.message.ack.accepted_bytes
                    self.receiver.acknowledged(action.stream, accepted)
            elif isinstance(action, EndStream):
                assert action.stream not in self.ends
                self.ends[action.stream] = action.fault
            else:
                self.events.append(action)

    def stored(self, block: int, group: int, layer: int) -> bytes:
        at = TABLE[block] * LAYOUT.block_bytes + LAYOUT.layer_offset(group, layer)
        return bytes(self.buffer[at : at + LAYOUT.layer_bytes(group)])

    def verified(self, stream: int) -> list[tuple[int, int, int, int]]:
        opened = self.responses[stream][0].opened
        assert all(r.layer_count == 1 for r in opened.verified)
        return [(r.group, r.layer_start, r.block_start, r.block_count) for r in opened.verified]

    def fault(self, stream: int) -> Fault:
        fault = self.ends[stream]
        assert fault is not None
        return fault

    def told(self) -> Fault:
        """What D's machine was told of a failure."""
        (failed,) = [e for e in self.events if isinstance(e, ev.ReceiveFailed)]
        return failed.fault
