"""Invariant 4, from P's side: it says that it has stopped when none of its threads writes into D's
pool any more, and not before; then the blocks are another's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import grpc.aio
import pytest
import pytest_asyncio

from pd_grpc.blocks.pool import BlockPool
from pd_grpc.decode import actions as act
from pd_grpc.decode import events as decode_ev
from pd_grpc.decode.bulk import BulkServer
from pd_grpc.decode.receiver import Receiver
from pd_grpc.decode.transfer import Owner
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.engine.pool_buffer import PoolBuffer
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.actions import OpenTransfer
from pd_grpc.prefill.bulk import BulkSender
from pd_grpc.protocol.clock import ManualClock, SystemClock
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.transport.base import LayerRun, ReceiveSide, SendPlan, SendSide
from pd_grpc.transport.shm import copy_queue, copying
from pd_grpc.transport.shm.receive import ShmReceive
from pd_grpc.transport.shm.send import ShmTransport
from pd_grpc.v1 import decode_pb2, layout_pb2, transfer_pb2, types_pb2
from tests.transport.held_copies import LIMIT_S, Held
from tests.transport.shm_pool import BLOCKS, LAYOUT, P
from tests.waiting import until

SHM = layout_pb2.TRANSPORT_SHM
SIZE = LAYOUT.block_bytes
KEY, GRANT, SESSION, EPOCH = TransferKey("t-1", 1), "g", "s", 1
PROGRESS_S = 0.2
OWNER = Owner(P.name, P.epoch)
SENT, ANOTHERS = 1, 99
STILL_S = 0.5
"""So long what must not come is waited for."""


class Sides:
    """P's bulk side and D's, and D's pool, all of which is granted: eight parts to copy. P's loop
    copies the first, each thread one of the others at a time."""

    def __init__(self) -> None:
        self.heard: list[ev.Event] = []
        self.writers: list[bool] = []
        self.accounts = BlockPool(BLOCKS)
        self.holding = self.accounts.reserve(BLOCKS, owner="t-1")
        self.pool = PoolBuffer(BLOCKS * SIZE, shared=True)
        memory = HostKvMemory(self.pool.view, LAYOUT, self.pool.fd)
        receive = ShmReceive(ReceiveSide(LAYOUT, memory))
        self._config = DecodeConfig(audit_every=0)
        receiver = Receiver(self._config, LAYOUT, memory, EPOCH, {SHM: receive})
        self.decode = BulkServer(self._config, receiver, SystemClock(), transports=[receive])
        self.decode.listeners.append(self._of_decode)
        self._metadata = receive.metadata()
        own = HostKvMemory(bytearray([SENT]) * (BLOCKS * SIZE), LAYOUT)
        half = ShmTransport(SendSide(P, LAYOUT, own, grpc.aio.insecure_channel))
        self.clock = ManualClock()
        """P's own: D is silent for too long when a test says so."""
        self.bulk = BulkSender(LAYOUT, [{SHM: half}], SIZE, self.clock, self.heard.append)
        self._sends = True

    async def start(self) -> None:
        self.decode.start()
        self.decode.post(act.AdmitSession(OWNER, SESSION))
        blocks, wanted = tuple(self.holding.blocks), ((0, BLOCKS),)
        self.decode.post(act.OpenReceive(GRANT, KEY, OWNER, blocks, wanted, SHM))
        self.bulk.start()
        shard = layout_pb2.Shard(endpoint=self.decode.endpoint, transport_metadata=self._metadata)
        d = types_pb2.Instance(name="d", epoch=EPOCH, role=types_pb2.ROLE_DECODE)
        await self.bulk.reach(decode_pb2.Welcome(transport=SHM, shards=[shard], instance=d))

    def open(self) -> None:
        """Send all of it."""
        runs = tuple(LayerRun(g, 0, group.layers) for g, group in enumerate(LAYOUT.groups))
        tokens = BLOCKS * LAYOUT.block_size
        plan = SendPlan(tokens, tuple(range(BLOCKS)), ((0, BLOCKS),), runs, ready=tokens)
        message = transfer_pb2.TransferOpen(
            session_id=SESSION, grant_id=GRANT, transport=SHM, ref=KEY.ref(EPOCH)
        )
        endpoint = self.decode.endpoint
        timeouts = PROGRESS_S, LIMIT_S
        self.bulk.open(OpenTransfer(KEY, 0, "d", endpoint, message, plan, *timeouts), ())

    def of(self, kind: type[ev.Event]) -> list[ev.Event]:
        return [event for event in self.heard if isinstance(event, kind)]

    async def never(self, kind: type[ev.Event]) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await until(lambda: bool(self.of(kind)), STILL_S)

    def give_to_another(self) -> None:
        """P has stopped: the blocks are free, and the next one's."""
        self.holding.release()
        self.holding = self.accounts.reserve(BLOCKS, owner="t-2")
        self.pool.view[:] = bytes([ANOTHERS]) * (BLOCKS * SIZE)

    async def stop_sending(self) -> None:
        """P's threads have ended."""
        if self._sends:
            self._sends = False
            await asyncio.to_thread(self.bulk.stop)

    async def stop(self) -> None:
        await self.stop_sending()
        await asyncio.to_thread(self.decode.stop)
        self.holding.release()
        self.accounts.check()
        assert self.accounts.free == BLOCKS
        self.pool.close()

    def _of_decode(self, event: decode_ev.Event) -> None:
        """On D's bulk thread."""
        if isinstance(event, decode_ev.WriterAttached | decode_ev.WriterGone):
            self.writers.append(isinstance(event, decode_ev.WriterAttached))


@pytest_asyncio.fixture
async def sides(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sides]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(copy_queue, "PART_BYTES", SIZE)
    made = Sides()
    await made.start()
    yield made
    await made.stop()


def hold(sides: Sides, monkeypatch: pytest.MonkeyPatch, threads: int) -> Held:
    held = Held(threads)
    monkeypatch.setattr(copying, "copy_each", held)
    return held


async def test_a_transfer_is_not_over_while_a_thread_copies_for_it(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = hold(sides, monkeypatch, threads=2)
    sides.open()
    await asyncio.to_thread(held.began)
    sides.bulk.close(KEY, 0)
    await sides.never(ev.TransferClosed)
    held.release.set()
    await until(lambda: bool(sides.of(ev.TransferClosed)))
    assert held.under_way == 0
    (closed,) = sides.of(ev.TransferClosed)
    assert isinstance(closed, ev.TransferClosed) and closed.stopped
    # What the loop and the threads were at, and nothing that was not begun.
    assert bytes(sides.pool.view).count(SENT) == 3 * SIZE
    sides.give_to_another()
    await sides.stop_sending()
    assert bytes(sides.pool.view) == bytes([ANOTHERS]) * (BLOCKS * SIZE)


async def test_the_pool_is_let_go_of_when_no_thread_copies_into_it_any_more(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To let go of it is a word that P has stopped."""
    held = hold(sides, monkeypatch, threads=2)
    sides.open()
    await asyncio.to_thread(held.began)
    sides.bulk.close(KEY, 0)
    sides.bulk.forget(sides.decode.endpoint)
    with pytest.raises(asyncio.TimeoutError):
        await until(lambda: sides.writers != [True], STILL_S)
    held.release.set()
    await until(lambda: sides.writers == [True, False])
    await until(lambda: bool(sides.of(ev.TransferClosed)))


async def test_a_stream_that_follows_waits_for_the_threads_of_the_one_before(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end says that nothing of the transfer is written any more, whichever stream wrote it."""
    held = hold(sides, monkeypatch, threads=1)
    sides.open()
    await asyncio.to_thread(held.began)
    # D hears nothing of it, and P takes that for D's silence.
    sides.clock.advance(PROGRESS_S)
    await until(lambda: bool(sides.of(ev.TransferBroken)))
    sides.open()
    await sides.never(ev.TransferCompleted)
    held.release.set()
    await until(lambda: bool(sides.of(ev.TransferCompleted)))
    assert held.under_way == 0
    assert bytes(sides.pool.view) == bytes([SENT]) * (BLOCKS * SIZE)
    sides.give_to_another()
    await sides.stop_sending()
    assert bytes(sides.pool.view) == bytes([ANOTHERS]) * (BLOCKS * SIZE)


async def test_a_copy_that_fails_ends_its_transfer_and_no_other(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(threads=1, error=MemoryError())
    held.release.set()
    monkeypatch.setattr(copying, "copy_each", held)
    sides.open()
    await until(lambda: bool(sides.of(ev.TransferBroken)))
    (broken,) = sides.of(ev.TransferBroken)
    assert isinstance(broken, ev.TransferBroken) and broken.stopped
    fault = broken.fault
    assert isinstance(fault, Fault) and fault.code is Code.INTERNAL
    assert fault.reason is Reason.ENGINE_ERROR
    assert fault.message == "KV could not be sent: MemoryError"
    sides.open()
    await until(lambda: bool(sides.of(ev.TransferCompleted)))
    assert bytes(sides.pool.view) == bytes([SENT]) * (BLOCKS * SIZE)
