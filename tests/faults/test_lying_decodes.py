"""A D that says of its memory, or of what it has, what cannot be: its own request fails with it,
and P goes on as before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from pd_grpc.decode.server import DecodeServer
from pd_grpc.decode.transfer_outbox import TransferOutbox
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.transport.shm.receive import ShmReceive
from pd_grpc.v1 import layout_pb2, shm_pb2, transfer_pb2
from tests.prefill.cluster import SMALL, Cluster, answer_to, request_to, running

SHARED = ("shm", "inline")
SHM, INLINE = layout_pb2.TRANSPORT_SHM, layout_pb2.TRANSPORT_INLINE
TOKENS, BLOCKS = 50, 13
GREATEST = 2**32 - 1
LIARS_ACK_BYTES = 1 << 20
"""By this the words of the one that lies are told from those of the other."""
pytestmark = pytest.mark.timeout(30)

Runs = Sequence[tuple[int, Sequence[int]]]


def target(*runs: tuple[int, Sequence[int]]) -> layout_pb2.MemoryDescriptor:
    told = shm_pb2.ShmTarget(runs=[shm_pb2.ShmRun(start=s, blocks=blocks) for s, blocks in runs])
    return layout_pb2.MemoryDescriptor(kind=SHM, handle=told.SerializeToString())


def of_kind(runs: Runs) -> layout_pb2.MemoryDescriptor:
    told = target(*runs)
    told.kind = INLINE
    return told


def of_device(runs: Runs) -> layout_pb2.MemoryDescriptor:
    told = target(*runs)
    told.device = 1
    return told


TARGETS: dict[str, Callable[[Runs], layout_pb2.MemoryDescriptor]] = {
    "no block": lambda runs: target(),
    "the first blocks alone": lambda runs: target((0, runs[0][1][:2])),
    "other blocks": lambda runs: target((GREATEST, runs[0][1])),
    "a block outside the pool": lambda runs: target((0, [SMALL["num_blocks"]] * BLOCKS)),  # type: ignore[list-item]
    "no memory of shm's": of_kind,
    "a device": of_device,
    "no message": lambda runs: layout_pb2.MemoryDescriptor(kind=SHM, handle=b"\xff\xff"),
    "nothing": lambda runs: layout_pb2.MemoryDescriptor(),
}


async def serves(cluster: Cluster, d: DecodeServer, seed: int) -> None:
    request = request_to(d, tokens=TOKENS, random_seed=seed)
    _, outcome = await cluster.run(cluster.prefills[0], d, request)
    assert outcome.tokens == answer_to(request)


@pytest.mark.parametrize("case", TARGETS)
async def test_a_decode_that_does_not_say_where_to_write_fails_that_request(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as cluster:
        p = await cluster.prefill(transports=SHARED)
        d = await cluster.decode(transports=SHARED)
        await serves(cluster, d, 1)
        with monkeypatch.context() as lying:
            lying.setattr(ShmReceive, "target", lambda self, runs: TARGETS[case](runs))
            legs = await cluster.run(p, d, request_to(d, tokens=TOKENS, random_seed=2))
        for leg in legs:
            assert isinstance(leg.fault, Fault) and leg.fault.reason is Reason.WRONG_STATE
        assert len(legs[1].tokens) <= 1, "none but the first, which is P's own"
        await serves(cluster, d, 3)
    assert [r.getMessage() for r in caplog.records if "failed" in r.getMessage()] == []


def everything(**fields: int) -> transfer_pb2.KvRange:
    values = {"layer_count": GREATEST, "block_count": GREATEST, **fields}
    return transfer_pb2.KvRange(**values)


@pytest.mark.parametrize("word", ["opened", "ack"])
@pytest.mark.parametrize(
    "said", [everything(), everything(layer_start=GREATEST, block_start=GREATEST)], ids=str
)
async def test_a_decode_that_has_more_than_there_is_keeps_no_other_waiting(
    word: str, said: transfer_pb2.KvRange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranges were counted through, four billion layers of them, while the KV for others
    waited."""
    right, lies = TransferOutbox.send, 0

    def send(outbox: TransferOutbox, message: transfer_pb2.TransferResponse) -> None:
        nonlocal lies
        if outbox._ack_bytes == LIARS_ACK_BYTES and message.HasField(word):
            told = message.opened.verified if word == "opened" else message.ack.ranges
            told.append(said)
            lies += 1
        right(outbox, message)

    monkeypatch.setattr(TransferOutbox, "send", send)
    async with running() as cluster:
        p = await cluster.prefill()
        liar = await cluster.decode(name="liar", send_window_bytes=2 * LIARS_ACK_BYTES)
        honest = await cluster.decode(name="honest")
        await serves(cluster, honest, 1)
        lied = asyncio.create_task(cluster.run(p, liar, request_to(liar, tokens=TOKENS)))
        for seed in (2, 3):
            await serves(cluster, honest, seed)
        for leg in await lied:
            assert leg.fault is None or isinstance(leg.fault, Fault)
        assert lies
