"""P and D over NIXL: the same answers, no token of bytes that are wrong, and blocks that come back
whatever becomes of P."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from pd_grpc.blocks.pool import BlockPool, BlockState
from pd_grpc.decode.server import DecodeServer
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.transport.nixl import acceptor, link, send
from pd_grpc.transport.nixl.agent import Agent, Piece
from pd_grpc.transport.nixl.receive import NixlReceive
from pd_grpc.v1 import layout_pb2, transfer_pb2
from tests.cluster import SIM, Cluster, cluster
from tests.prefill.cluster import Cluster as Pair
from tests.prefill.cluster import answer_to, request_to, running
from tests.system.asking import Reply, ask, random_request, request
from tests.transport.nixl_pool import needs_nixl
from tests.transport.nixl_servers import (
    ServerProcess,
    freeze,
    prefill_process,
    server_process,
)
from tests.waiting import until

NIXL: dict[str, Any] = {
    "transports": ("nixl", "inline"),
    # Four agents are made at once here, and others use the machine too.
    "connect_s": 20.0,
}
BLOCKS = 24
pytestmark = pytest.mark.timeout(120)


async def answers(running: Cluster, seeds: range) -> list[Reply]:
    async with running.client() as stub:
        return await asyncio.gather(*(ask(stub, request(*random_request(s))) for s in seeds))


def transports(running: Cluster) -> set[int]:
    """What the sessions of the Ps go by."""
    return {s.welcome.transport for p in running.prefills for s in p.machine.conversations.all()}


@needs_nixl
async def test_answers_over_nixl_are_those_of_the_aggregated_server() -> None:
    seeds = range(48)
    async with cluster(**NIXL, decode_settings={"audit_every": 2}) as apart:
        disaggregated = await answers(apart, seeds)
        assert transports(apart) == {layout_pb2.TRANSPORT_NIXL}
    async with cluster(aggregated=True) as together:
        aggregated = await answers(together, seeds)
    assert [r.essence for r in disaggregated] == [r.essence for r in aggregated]
    config = DecodeConfig(**SIM)
    assert [r.token_ids for r in disaggregated] == [
        sim_answer(*random_request(seed), config) for seed in seeds
    ]


@needs_nixl
async def test_two_prefills_and_two_decodes_write_each_to_each_and_use_small_pools_again() -> None:
    seeds = range(40)
    async with cluster(prefills=2, decodes=2, **NIXL, decode_settings={"num_blocks": 24}) as many:
        replies = await answers(many, seeds)
        assert transports(many) == {layout_pb2.TRANSPORT_NIXL}
    config = DecodeConfig(**SIM)
    assert [r.token_ids for r in replies] == [
        sim_answer(*random_request(seed), config) for seed in seeds
    ]


@needs_nixl
async def test_wrong_bytes_in_the_pool_are_never_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of each chunk's first block is another than what P has written."""
    right = NixlReceive.land

    def planted(
        self: NixlReceive,
        chunk: transfer_pb2.KvChunk,
        payload: memoryview,
        blocks: Sequence[int],
        fresh: bool,
        audited: bool,
    ) -> None:
        layers = chunk.layer_start, chunk.layer_count
        stored = bytearray(self._memory.read(blocks[:1], chunk.group, *layers)[0])
        stored[-1] ^= 1
        self._memory.write(blocks[:1], chunk.group, *layers, memoryview(stored))
        right(self, chunk, payload, blocks, fresh, audited)

    monkeypatch.setattr(NixlReceive, "land", planted)
    async with running() as pair:
        p = await pair.prefill(name="p", **NIXL)
        d = await pair.decode(**NIXL, audit_every=1)
        _, outcome = await pair.run(p, d, request_to(d, tokens=40))
        assert isinstance(outcome.fault, Fault) and outcome.fault.reason is Reason.KV_CORRUPT
        assert len(outcome.tokens) <= 1, "none but the first, which is P's own"


def quarantined(pool: BlockPool) -> int:
    return pool.counts()[BlockState.QUARANTINED]


async def lose_in_mid_transfer(pair: Pair, d: DecodeServer, p: ServerProcess, how: int) -> None:
    """A request whose P gets a signal when it has begun to write, and that D gives up."""
    lost = request_to(d, tokens=50)
    generating = asyncio.create_task(pair.run_generate(d, lost))
    prefilling = asyncio.create_task(pair.run_prefill(p, lost))  # type: ignore[arg-type]
    await until(lambda: d.pool.counts()[BlockState.RECEIVING] > 0)
    (transfer,) = d.machine.ledger.transfers.values()
    assert transfer.carrier.transport == layout_pb2.TRANSPORT_NIXL
    assert transfer.owner is not None and d.machine.ledger.quarantine.is_attached(transfer.owner)
    p.process.send_signal(how)
    outcome = await generating
    assert isinstance(outcome.fault, Fault) and outcome.fault.reason is Reason.PREFILL_LOST
    prefilling.cancel()
    await asyncio.wait([prefilling])


async def serve_under_pressure(pair: Pair, d: DecodeServer) -> None:
    """Another P serves many; each answer is right."""
    p = await pair.prefill(name="q", **NIXL)
    for seed in range(6):
        requests = [request_to(d, tokens=30, random_seed=100 * seed + i) for i in range(2)]
        served = await asyncio.gather(*(pair.run(p, d, each) for each in requests))
        for each, (_, outcome) in zip(requests, served, strict=True):
            assert (outcome.fault, outcome.tokens) == (None, answer_to(each))
    (session,) = p.machine.conversations.all()
    assert session.welcome.transport == layout_pb2.TRANSPORT_NIXL


@needs_nixl
async def test_blocks_of_a_killed_writer_come_back_by_themselves() -> None:
    async with running() as pair, prefill_process() as p:
        d = await pair.decode(num_blocks=BLOCKS, **NIXL)
        await lose_in_mid_transfer(pair, d, p, signal.SIGKILL)
        await until(lambda: d.pool.counts()[BlockState.FREE] == BLOCKS)
        await serve_under_pressure(pair, d)


@needs_nixl
async def test_a_stopped_writer_loses_its_way_into_the_pool_and_then_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptor, "SILENT_S", 3.0)
    async with running() as pair, prefill_process() as p:
        d = await pair.decode(num_blocks=BLOCKS, **NIXL)
        await lose_in_mid_transfer(pair, d, p, signal.SIGSTOP)
        assert quarantined(d.pool) > 0, "until its agent is destroyed"
        await until(lambda: quarantined(d.pool) == 0)
        p.process.send_signal(signal.SIGCONT)
        await serve_under_pressure(pair, d)


@needs_nixl
async def test_blocks_of_a_write_to_a_frozen_d_come_back_when_d_has_ended_it_and_not_by_p(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P gives D up while its write lies in D's socket, and does not say that it has stopped."""
    monkeypatch.setattr(link, "CONFIRM_S", 0.3)
    monkeypatch.setattr(send, "SETTLE_S", 0.1)
    lively: dict[str, Any] = {"heartbeat_s": 5.0, "lease_s": 15.0}
    async with (
        running() as pair,
        server_process("tests.transport.nixl_decode", name="d", num_blocks=BLOCKS, **lively) as d,
    ):
        p = await pair.prefill(name="p", **NIXL, **lively)
        whole, taken = await d.ask("counts"), await d.ask("pattern")
        frozen = freeze_at_first_write(monkeypatch, d)
        lost = request_to(d.endpoint, tokens=50)
        prefilling = asyncio.create_task(pair.run_prefill(p, lost))
        generating = asyncio.create_task(pair.run_generate(d, lost))  # type: ignore[arg-type]
        await frozen.wait()
        prefilling.cancel()
        # P has let go of its own blocks, having waited in vain.
        await until(lambda: not p.view.transfers() and p.pool.free == p.pool.total)
        d.process.send_signal(signal.SIGCONT)
        outcome = await generating
        assert isinstance(outcome.fault, Fault) and outcome.fault.reason is Reason.CLIENT_GONE
        await until(lambda: len(p.machine.placement.releases) == 0)
        counts = await d.ask("counts")
        assert counts["QUARANTINED"] > 0, ("its agent is not destroyed yet", counts)
        await d.ask("let")
        assert await d.ask("freed") == whole["FREE"] - taken
        for seed in range(8):
            requests = [
                request_to(d.endpoint, tokens=30, random_seed=100 * seed + i) for i in range(2)
            ]
            served = await asyncio.gather(*(pair.run(p, d, r) for r in requests))  # type: ignore[arg-type]
            for each, (_, answered) in zip(requests, served, strict=True):
                assert (answered.fault, answered.tokens) == (None, answer_to(each))
        assert await d.ask("compare") is True
        counts = await d.ask("counts")
        assert counts["FREE"] + counts["CACHED"] == whole["FREE"]


def freeze_at_first_write(monkeypatch: pytest.MonkeyPatch, d: ServerProcess) -> asyncio.Event:
    """Have a D stopped by SIGSTOP before the first write to it; set once that is under way."""
    frozen, loop, right = asyncio.Event(), asyncio.get_running_loop(), Agent.write

    def write(self: Agent, pieces: Sequence[Piece]) -> int:
        first = not frozen.is_set()
        if first:
            freeze(d.process.pid)
        begun = right(self, pieces)
        if first:
            monkeypatch.setattr(Agent, "write", right)
            loop.call_soon_threadsafe(frozen.set)
        return begun

    monkeypatch.setattr(Agent, "write", write)
    return frozen
