"""A D as a whole: coming up, being looked at, draining, going."""

from __future__ import annotations

import asyncio
import socket
import threading
from functools import partial

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pd_grpc.decode.server import SERVICES, start_decode
from pd_grpc.engine.base import EngineFault
from pd_grpc.engine.sim import SimEngine
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Code, Reason
from pd_grpc.protocol.rpc import PortInUse
from pd_grpc.v1 import admin_pb2, inference_pb2, types_pb2
from tests.decode.wire import CALL_S, SIM, GatedEngine, Wire, fault_of, tokens_of, wire
from tests.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class SlowToWarm(SimEngine):
    """Warms up when told, and dirties the block it may touch."""

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config)
        self.may_warm = threading.Event()
        self.warmed_on = ""

    def warm_up(self) -> None:
        self.warmed_on = threading.current_thread().name
        assert self.may_warm.wait(CALL_S)
        self.memory.write([0], 0, 0, 3, memoryview(b"\xee" * self.layout.block_bytes))


async def becomes(channel: grpc.aio.Channel, service: str, status: int) -> None:
    """Watch until a service has a status."""
    request = health_pb2.HealthCheckRequest(service=service)
    async for answer in health_pb2_grpc.HealthStub(channel).Watch(request, timeout=CALL_S):
        if answer.status == status:
            return


async def health(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    answer = await stub.Check(request, timeout=CALL_S, wait_for_ready=True)
    return int(answer.status)


async def test_alive_at_once_and_ready_when_warm() -> None:
    config = DecodeConfig(**SIM, port=free_port())
    engine = SlowToWarm(config)
    starting = asyncio.create_task(start_decode(config, engine))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{config.port}") as channel:
        assert await health(channel, "") == SERVING
        assert await health(channel, SERVICES[0]) == NOT_SERVING
        engine.may_warm.set()
        server = await starting
        assert engine.warmed_on.startswith("pd-engine")
        await becomes(channel, SERVICES[0], SERVING)
        assert server.pool.free == server.pool.total
        await server.stop()


async def states_become(d: Wire, wanted: set[str]) -> None:
    """Wait until the transfers in flight are in these states, as an operator sees them."""
    states: set[str] = set()
    while states != wanted:
        listed = await d.admin.ListTransfers(admin_pb2.ListTransfersRequest(), timeout=CALL_S)
        names = (types_pb2.TransferState.Name(t.state) for t in listed.transfers)
        states = {name.removeprefix("TRANSFER_STATE_") for name in names}


async def test_no_request_gets_the_block_that_is_warmed() -> None:
    async with wire() as d:
        pass
    config = DecodeConfig(**{**SIM, "num_blocks": 8}, port=free_port())
    engine = SlowToWarm(config)
    starting = asyncio.create_task(start_decode(config, engine))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{config.port}") as channel:
        d.channel = channel
        assert await health(channel, "") == SERVING
        small = d.request(prompt=list(range(100, 110)))
        large = d.request(prompt=list(range(200, 227)))
        calls = [asyncio.create_task(tokens_of(d.generate(r, local=True))) for r in (small, large)]
        await asyncio.wait_for(states_become(d, {"RECEIVING", "WAITING"}), CALL_S)
        engine.may_warm.set()
        server = await starting
        assert await asyncio.gather(*calls) == [d.answer(small), d.answer(large)]
        await server.stop()


async def test_an_engine_that_does_not_warm_up_leaves_nothing() -> None:
    class Cold(SimEngine):
        def warm_up(self) -> None:
            raise EngineFault("no kernel for this device")

    before = threads()
    config = DecodeConfig(**SIM, port=free_port())
    with pytest.raises(EngineFault, match="no kernel"):
        await start_decode(config, Cold(config))
    await nothing_left(before, config.port)


def threads() -> set[threading.Thread]:
    """Those that a server of ours starts."""
    return {t for t in threading.enumerate() if t.name.startswith("pd-")}


async def nothing_left(before: set[threading.Thread], *ports: int) -> None:
    assert threads() == before
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    await until(lambda: not {t for t in tasks if not t.done() and "pd_grpc" in repr(t)})
    for port in ports:
        with socket.socket() as again:
            again.bind(("127.0.0.1", port))


@pytest.mark.parametrize("which", ["port", "bulk_port"])
async def test_a_port_in_use_is_an_error_and_nothing_is_left(which: str) -> None:
    before = threads()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        other = free_port()
        ports = {"port": other, "bulk_port": other, which: port}
        config = DecodeConfig(**SIM, **ports)
        with pytest.raises(PortInUse, match=str(port)):
            await start_decode(config, SimEngine(config))
        await nothing_left(before, other)


async def test_reflection_lists_the_services_and_the_model_is_told() -> None:
    async with wire() as d:
        stub = reflection_pb2_grpc.ServerReflectionStub(d.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]), timeout=CALL_S)
        async for answer in call:
            listed = {service.name for service in answer.list_services_response.service}
        assert listed >= {*SERVICES, "grpc.health.v1.Health"}
        info = await d.inference.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=CALL_S)
        assert (info.model, info.vocab_size, info.layout.block_size) == ("sim", 1000, 4)
        assert list(info.eos_token_ids) == [2]


async def test_an_operator_sees_and_ends_a_transfer() -> None:
    async with wire() as d:
        p = await d.prefill()
        request = d.request(request_id="mine")
        call = d.generate(request)
        grant = await p.allocate(request)
        info = await d.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=CALL_S)
        blocks = {b.state: b.blocks for b in info.server.blocks}
        assert blocks == {admin_pb2.BLOCK_STATE_FREE: 22, admin_pb2.BLOCK_STATE_RESERVED: 2}
        listed = await d.admin.ListTransfers(admin_pb2.ListTransfersRequest(), timeout=CALL_S)
        (transfer,) = listed.transfers
        assert transfer.ref == request.ref and transfer.request_id == "mine"
        assert transfer.state == types_pb2.TRANSFER_STATE_RESERVED
        assert (transfer.blocks, transfer.peer) == (2, "p")
        assert transfer.holder == "the lease of prefill p"
        assert transfer.next_timer == "lease" and 0 < transfer.next_timer_in.seconds <= 15
        end = admin_pb2.ReleaseTransferRequest(
            transfer_id=request.transfer_id, reason="maintenance"
        )
        ended = await d.admin.ReleaseTransfer(end, timeout=CALL_S)
        assert ended.transfer.state == types_pb2.TRANSFER_STATE_RELEASED
        assert (await fault_of(call)).reason is Reason.RELEASED
        assert (await p.told_of(request)).status.code == Code.ABORTED
        assert grant.grant_id


async def test_an_allocate_that_ends_without_a_grant_is_seen_by_those_who_watch() -> None:
    async with wire() as d:
        p = await d.prefill()
        blocker, waiting = d.request(prompt=list(range(100, 180))), d.request()
        waiting.prompt = list(range(300, 330))
        await p.allocate(blocker)
        ask = admin_pb2.WatchTransfersRequest(transfer_id=waiting.transfer_id)
        watch = d.admin.WatchTransfers(ask)
        await watch.initial_metadata()
        call = p.allocate(waiting)
        await d.until_state(waiting, "WAITING")
        call.cancel()
        seen = []
        while types_pb2.TRANSFER_STATE_RELEASED not in seen:
            answer = await asyncio.wait_for(watch.read(), CALL_S)
            seen.append(answer.transfer.state)
        watch.cancel()
        info = await d.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=CALL_S)
        assert [(c.state, c.transfers) for c in info.server.ended] == [(seen[-1], 1)]
        assert p.heard == [], "the caller who left is not told"
        await p.release(blocker)


async def test_a_drain_turns_readiness_off_and_waits_for_what_runs() -> None:
    async with wire(GatedEngine) as d:
        engine = d.server.engine
        assert isinstance(engine, GatedEngine)
        engine.gate.clear()
        request = d.request()
        call = asyncio.create_task(tokens_of(d.generate(request, local=True)))
        await asyncio.to_thread(engine.entered.wait, CALL_S)
        answer = await d.admin.Drain(admin_pb2.DrainRequest(), timeout=CALL_S)
        assert answer.transfers == 1
        assert not d.server.control.ready and d.server.control.reason == "draining"
        assert (await fault_of(d.generate(d.request()))).reason is Reason.DRAINING
        assert not d.server.runtime.drained.is_set()
        engine.gate.set()
        assert await call == d.answer(request)
        await asyncio.wait_for(d.server.drained(), CALL_S)


async def test_a_stop_ends_everything_with_a_reason_and_returns_all_blocks() -> None:
    """S15, F53."""
    before = threads()
    config = DecodeConfig(**SIM)
    engine = GatedEngine(config)
    engine.gate.clear()
    server = await start_decode(config, engine)
    async with wire() as d:
        d.server, real = server, d.server
        d.channel, channel = grpc.aio.insecure_channel(server.endpoint), d.channel
        p = await d.prefill()
        decoding, reserved, expected = (d.request() for _ in range(3))
        waiting = d.request(prompt=list(range(300, 380)))
        clients = [d.generate(r) for r in (decoding, reserved, expected)]
        failed = [asyncio.create_task(fault_of(call)) for call in clients]
        await p.hand_over(decoding)
        await asyncio.to_thread(engine.entered.wait, CALL_S)
        await p.allocate(reserved)
        queued = asyncio.create_task(fault_of(p.allocate(waiting)))
        await until(lambda: server.machine.find(waiting.transfer_id, 0) is not None)
        await until(lambda: server.machine.find(expected.transfer_id, 0) is not None)
        stopping = asyncio.create_task(server.stop())
        for fault in await asyncio.gather(*failed, queued):
            assert fault.reason is Reason.DRAINING and fault.code is Code.UNAVAILABLE
        await until(lambda: any(m.HasField("goodbye") for m in p.heard))
        assert not stopping.done(), "the step is waited for"
        engine.gate.set()
        await stopping
        server.pool.check()
        assert server.pool.free == server.pool.total
        assert server.machine.ledger.transfers == {}
        await d.channel.close(None)
        await p.close()
        d.peers.clear()
        d.server, d.channel = real, channel
    await nothing_left(before)


async def test_a_storm_of_cancels_leaves_it_answering() -> None:
    """F40."""
    async with wire() as d:
        transfers = d.server.machine.ledger.transfers

        def has_come(storm: str) -> bool:
            return any(t.request_id.startswith(f"{storm}-") for t in transfers.values())

        for storm in map(str, range(20)):
            asked = [d.request(max_tokens=50, request_id=f"{storm}-{i}") for i in range(20)]
            calls = [d.generate(request, local=True) for request in asked]
            await until(partial(has_come, storm))
            for call in calls:
                call.cancel()
        request = d.request()
        assert await tokens_of(d.generate(request, local=True)) == d.answer(request)
