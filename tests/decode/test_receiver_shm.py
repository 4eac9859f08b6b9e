"""The receiver with a sender that writes into the pool itself: what it takes for written, and what
bad input gets. Blocks beside the grant's hold a pattern that must stay whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import google_crc32c
import pytest

from pd_grpc.decode import events as ev
from pd_grpc.decode.receiver import EndStream, Receiver, Respond, is_audited
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.engine.pool_buffer import PoolBuffer
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.transport.base import ReceiveSide, ReceiveTransport
from pd_grpc.transport.chunk_codec import split_chunk
from pd_grpc.transport.inline import InlineReceive
from pd_grpc.transport.shm.receive import ShmReceive
from pd_grpc.v1 import layout_pb2, shm_pb2, transfer_pb2, types_pb2
from tests.decode.receiver_shard import EPOCH, KEY, LAYER, LAYOUT, OWNER, TABLE, WANTED

INLINE, SHM = layout_pb2.TRANSPORT_INLINE, layout_pb2.TRANSPORT_SHM
BLOCKS = 8
PATTERN = bytes(range(1, 1 + LAYOUT.block_bytes))


class Shard:
    """A receiver with one grant by shm, over a pool in shared memory."""

    def __init__(
        self,
        audit_every: int = 0,
        grant: int = SHM,
        name: str = "g",
        wanted: Sequence[tuple[int, int]] = ((0, WANTED),),
    ) -> None:
        self.buffer = PoolBuffer(BLOCKS * LAYOUT.block_bytes, shared=True)
        self.buffer.view[:] = PATTERN * BLOCKS
        memory = HostKvMemory(self.buffer.view, LAYOUT, self.buffer.fd)
        self.shm = ShmReceive(ReceiveSide(LAYOUT, memory))
        transports: dict[int, ReceiveTransport] = {SHM: self.shm, INLINE: InlineReceive(memory)}
        config = DecodeConfig(audit_every=audit_every)
        self.receiver = Receiver(config, LAYOUT, memory, EPOCH, transports)
        self.receiver.sessions.admit(OWNER, "s")
        self.memory = memory
        self.said: dict[int, list[transfer_pb2.TransferResponse]] = {}
        self.ends: dict[int, Fault | None] = {}
        self.events: list[ev.Event] = []
        self.name = name
        self.note(self.receiver.open_grant(name, KEY, OWNER, TABLE, wanted, grant))

    def stream(self, transport: int = SHM) -> int:
        number = len(self.said) + 1
        self.receiver.stream_began(number)
        self.said[number] = []
        ref = types_pb2.TransferRef(transfer_id="t", attempt=1, decode_epoch=EPOCH)
        message = transfer_pb2.TransferOpen(
            session_id="s",
            ref=ref,
            grant_id=self.name,
            transport=transport,  # type: ignore[arg-type]
        )
        self.send(number, transfer_pb2.TransferRequest(open=message))
        return number

    def write(self, blocks: tuple[int, int], layers: tuple[int, int], group: int = 0) -> bytes:
        """As P does it: put bytes where the grant says, before any chunk."""
        count = blocks[1] * layers[1] * LAYER
        payload = bytes((7 * i + 31 * blocks[0] + 3 * layers[0]) % 256 for i in range(count))
        to = TABLE[blocks[0] : blocks[0] + blocks[1]]
        self.memory.write(to, group, *layers, memoryview(payload))
        return payload

    def chunk(
        self, stream: int, blocks: tuple[int, int], layers: tuple[int, int], **fields: Any
    ) -> None:
        values: dict[str, Any] = {
            "block_start": blocks[0],
            "block_count": blocks[1],
            "layer_start": layers[0],
            "layer_count": layers[1],
            "descriptor": self.descriptor(),
        }
        values.update(fields)
        chunk = transfer_pb2.KvChunk(**{k: v for k, v in values.items() if v is not None})
        self.send(stream, transfer_pb2.TransferRequest(chunk=chunk))

    def descriptor(self, **fields: Any) -> layout_pb2.MemoryDescriptor:
        pool = shm_pb2.ShmShard.FromString(self.shm.metadata()).pool_id
        return layout_pb2.MemoryDescriptor(**{"kind": SHM, "handle": pool, **fields})

    def everything(self, stream: int, crc32c: bool = False) -> None:
        for blocks, layers, group in (((0, 2), (0, 3), 0), ((0, 2), (0, 1), 1)):
            crc = google_crc32c.value(self.write(blocks, layers, group)) if crc32c else 0
            if not crc32c:
                self.write(blocks, layers, group)
            self.chunk(stream, blocks, layers, group=group, crc32c=crc)

    def end(self, stream: int, chunks: int, size: int) -> None:
        said = transfer_pb2.TransferEnd(chunks=chunks, bytes=size)
        self.send(stream, transfer_pb2.TransferRequest(end=said))

    def send(self, stream: int, message: transfer_pb2.TransferRequest) -> None:
        self.note(self.receiver.message(stream, split_chunk(message), 0.0))

    def note(self, actions: Any) -> None:
        for action in actions:
            if isinstance(action, Respond):
                self.said[action.stream].append(action.message)
            elif isinstance(action, EndStream):
                self.ends[action.stream] = action.fault
            else:
                self.events.append(action)

    def neighbours_are_whole(self) -> bool:
        size = LAYOUT.block_bytes
        others = set(range(BLOCKS)) - set(TABLE[:WANTED])
        return all(bytes(self.buffer.view[b * size : (b + 1) * size]) == PATTERN for b in others)

    @property
    def failed(self) -> list[Reason]:
        """What D's machine was told."""
        return [e.fault.reason for e in self.events if isinstance(e, ev.ReceiveFailed)]


@pytest.fixture
def shard() -> Iterator[Shard]:
    made = Shard()
    yield made
    assert made.neighbours_are_whole()


def test_a_grant_says_where_to_write_and_is_complete_once_everything_is_named(
    shard: Shard,
) -> None:
    stream = shard.stream()
    opened = shard.said[stream][0].opened
    assert opened.target.kind == SHM and not opened.audit
    (run,) = shm_pb2.ShmTarget.FromString(opened.target.handle).runs
    assert (run.start, list(run.blocks)) == (0, TABLE[:WANTED])
    shard.everything(stream)
    assert [m.ack.accepted_bytes for m in shard.said[stream][1:]] == [6 * LAYER, 8 * LAYER]
    shard.end(stream, 2, 8 * LAYER)
    assert shard.ends[stream] is None
    assert shard.events[-1] == ev.ReceiveCompleted("g")


def test_an_identical_range_again_is_acknowledged(shard: Shard) -> None:
    stream = shard.stream()
    for _ in range(2):
        shard.chunk(stream, (0, 1), (0, 2))
    assert [m.ack.accepted_bytes for m in shard.said[stream][1:]] == [2 * LAYER, 4 * LAYER]
    assert not shard.failed


def test_a_grant_by_shm_may_be_served_inline(shard: Shard) -> None:
    """As after the memory was lost to P: what was written stays, the rest comes in chunks."""
    stream = shard.stream()
    shard.write((0, 2), (0, 3))
    shard.chunk(stream, (0, 2), (0, 3))
    again = shard.stream(INLINE)
    assert not shard.said[again][0].opened.HasField("target")
    payload = bytes(2 * LAYER)
    crc = google_crc32c.value(payload)
    shard.chunk(again, (0, 2), (0, 1), group=1, descriptor=None, payload=payload, crc32c=crc)
    shard.end(again, 1, 2 * LAYER)
    assert shard.ends[again] is None


def test_a_grant_that_is_inline_cannot_be_written_to() -> None:
    shard = Shard(grant=INLINE)
    stream = shard.stream()
    fault = shard.ends[stream]
    assert fault is not None and fault.reason is Reason.FEATURE
    assert fault.metadata == {"feature": "open.transport"}
    assert shard.failed == [] and shard.neighbours_are_whole()


BAD: list[tuple[str, tuple[int, int], tuple[int, int], dict[str, Any]]] = [
    ("chunk.block_start", (1, 2), (0, 1), {}),
    ("chunk.block_start", (2, 1), (0, 1), {}),
    ("chunk.block_start", (0, 0), (0, 1), {}),
    ("chunk.block_start", (0, 2**32 - 1), (0, 1), {}),
    ("chunk.layer_start", (0, 1), (2, 2), {}),
    ("chunk.layer_start", (0, 1), (0, 0), {}),
    ("chunk.group", (0, 1), (0, 1), {"group": 2}),
    ("chunk.payload", (0, 1), (0, 1), {"payload": b"x"}),
    ("chunk.payload", (0, 1), (0, 1), {"payload": bytes(LAYER)}),
]


@pytest.mark.parametrize(("field", "blocks", "layers", "fields"), BAD)
def test_ranges_outside_the_grant_and_wrong_lengths_fail_the_transfer(
    shard: Shard,
    field: str,
    blocks: tuple[int, int],
    layers: tuple[int, int],
    fields: dict[str, Any],
) -> None:
    stream = shard.stream()
    shard.chunk(stream, blocks, layers, **fields)
    fault = shard.ends[stream]
    assert fault is not None and fault.reason is Reason.BAD_REQUEST
    assert field in [wrong.field for wrong in fault.fields]
    assert shard.failed == [Reason.BAD_REQUEST]
    assert bytes(shard.buffer.view) == PATTERN * BLOCKS


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("kind", {"kind": INLINE}),
        ("kind", {"kind": layout_pb2.TRANSPORT_NIXL}),
        ("kind", {"kind": 99}),
        ("handle", {"handle": b""}),
        ("handle", {"handle": b"another pool's"}),
        ("device", {"device": 1}),
        ("kind", None),
    ],
)
def test_a_descriptor_that_is_not_the_grants_fails_the_transfer(
    shard: Shard, field: str, wrong: dict[str, Any] | None
) -> None:
    stream = shard.stream()
    if wrong is None:
        # Neither bytes nor where they are.
        shard.chunk(stream, (0, 1), (0, 1), descriptor=None, payload=bytes(LAYER))
    else:
        shard.chunk(stream, (0, 1), (0, 1), descriptor=shard.descriptor(**wrong))
    fault = shard.ends[stream]
    assert fault is not None and fault.reason is Reason.BAD_REQUEST
    assert f"chunk.descriptor.{field}" in [each.field for each in fault.fields]
    assert shard.failed == [Reason.BAD_REQUEST]
    assert bytes(shard.buffer.view) == PATTERN * BLOCKS


@pytest.mark.parametrize(("blocks", "layers"), [((0, 2), (0, 1)), ((0, 1), (0, 2))])
def test_overlapping_ranges_that_are_not_equal_fail_the_transfer(
    shard: Shard, blocks: tuple[int, int], layers: tuple[int, int]
) -> None:
    stream = shard.stream()
    shard.chunk(stream, (0, 1), (0, 1))
    shard.chunk(stream, blocks, layers)
    assert shard.failed == [Reason.BAD_REQUEST]


def test_a_chunk_after_the_end_is_not_heard_and_before_opened_is_refused(shard: Shard) -> None:
    stream = shard.stream()
    shard.everything(stream)
    shard.end(stream, 2, 8 * LAYER)
    heard = len(shard.events)
    shard.chunk(stream, (0, 2), (0, 3))
    assert len(shard.events) == heard
    early = len(shard.said) + 1
    shard.receiver.stream_began(early)
    shard.said[early] = []
    shard.chunk(early, (0, 2), (0, 3))
    fault = shard.ends[early]
    assert fault is not None and fault.reason is Reason.WRONG_STATE


def test_an_end_before_everything_was_named_fails_the_transfer(shard: Shard) -> None:
    stream = shard.stream()
    shard.write((0, 2), (0, 3))
    shard.chunk(stream, (0, 2), (0, 3))
    shard.end(stream, 1, 6 * LAYER)
    assert shard.failed == [Reason.BAD_REQUEST]


# The audit


def test_an_audited_transfer_is_compared_with_what_lies_in_the_pool() -> None:
    shard = Shard(audit_every=1)
    stream = shard.stream()
    assert shard.said[stream][0].opened.audit
    shard.everything(stream, crc32c=True)
    shard.end(stream, 2, 8 * LAYER)
    assert shard.ends[stream] is None
    assert shard.neighbours_are_whole()


@pytest.mark.parametrize("bit", [0, 7, 8 * 6 * LAYER - 1])
def test_an_audit_finds_one_bit_that_is_another(bit: int) -> None:
    shard = Shard(audit_every=1)
    stream = shard.stream()
    payload = shard.write((0, 2), (0, 3))
    block, at = divmod(bit // 8, 3 * LAYER)
    shard.buffer.view[TABLE[block] * LAYOUT.block_bytes + at] ^= 1 << bit % 8
    shard.chunk(stream, (0, 2), (0, 3), crc32c=google_crc32c.value(payload))
    fault = shard.ends[stream]
    assert fault is not None and fault.reason is Reason.KV_CORRUPT
    assert shard.failed == [Reason.KV_CORRUPT]


def test_what_is_not_audited_is_not_looked_at() -> None:
    """The odds are the audit's: what it does not sample it does not find."""
    shard = Shard(audit_every=0)
    stream = shard.stream()
    shard.chunk(stream, (0, 2), (0, 3), crc32c=1)
    assert shard.failed == []


def test_one_transfer_in_so_many_is_audited() -> None:
    """So a defect that corrupts every transfer is found within 64 with a chance of
    1 - (63/64)**64 = 0.64, within 300 with 0.99, and one transfer alone with 1/64."""
    grants = [f"g-{i:032x}" for i in range(20_000)]
    for every in (1, 8, 64):
        found = sum(is_audited(grant, every) for grant in grants)
        expected = len(grants) / every
        spread = (expected * (1 - 1 / every)) ** 0.5
        assert abs(found - expected) <= 4 * spread, every
    assert not any(is_audited(grant, 0) for grant in grants)


def test_a_planted_corruption_is_found_as_often_as_the_docs_say() -> None:
    """Every transfer is corrupt; those caught are the audited ones, about one in four."""
    caught = 0
    for number in range(400):
        shard = Shard(audit_every=4, name=f"g-{number:032x}")
        stream = shard.stream()
        payload = shard.write((0, 2), (0, 3))
        shard.buffer.view[TABLE[1] * LAYOUT.block_bytes] ^= 1
        shard.chunk(stream, (0, 2), (0, 3), crc32c=google_crc32c.value(payload))
        caught += shard.failed == [Reason.KV_CORRUPT]
        shard.buffer.close()
    assert 100 - 4 * 75**0.5 <= caught <= 100 + 4 * 75**0.5


def test_what_d_has_already_is_no_target() -> None:
    """A P that does not know where the other blocks are cannot write into them."""
    shard = Shard(wanted=[(1, 1)])
    stream = shard.stream()
    opened = shard.said[stream][0].opened
    runs = shm_pb2.ShmTarget.FromString(opened.target.handle).runs
    assert [(run.start, list(run.blocks)) for run in runs] == [(1, TABLE[1:2])]
    shard.chunk(stream, (0, 1), (0, 3))
    assert shard.ends[stream] is not None
    assert bytes(shard.buffer.view) == PATTERN * BLOCKS


def test_where_nothing_is_wanted_there_is_nowhere_to_write() -> None:
    shard = Shard(wanted=[])
    stream = shard.stream()
    opened = shard.said[stream][0].opened
    assert opened.target.kind == SHM
    assert not shm_pb2.ShmTarget.FromString(opened.target.handle).runs
    shard.end(stream, 0, 0)
    assert any(isinstance(event, ev.ReceiveCompleted) for event in shard.events)
