"""The control server: health, reflection, channelz, readiness, and an end that leaves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import MIB, ServerConfig, Sizes, Timeouts
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault
from pd_grpc.protocol.serving import ControlServer
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc
from tests.waiting import LIMIT_S

SERVICE = "pd_grpc.v1.AdminService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Work(admin_pb2_grpc.AdminServiceServicer):
    """A call and a stream that last until told, and note when they have cleaned up."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.again = asyncio.Event()
        self.finish = asyncio.Event()
        self.cleaning = asyncio.Event()
        self.may_clean = asyncio.Event()
        self.may_clean.set()
        self.cleaned = 0
        self.ballast = ""

    async def Drain(self, request: Any, context: Any) -> admin_pb2.DrainResponse:
        try:
            self.begun.set()
            await self.finish.wait()
            return admin_pb2.DrainResponse(transfers=7)
        finally:
            await self._clean()

    async def WatchTransfers(
        self, request: Any, context: Any
    ) -> AsyncIterator[admin_pb2.WatchTransfersResponse]:
        try:
            while not self.finish.is_set():
                if self.begun.is_set():
                    self.again.set()
                self.begun.set()
                transfer = admin_pb2.TransferInfo(waits_for=self.ballast)
                yield admin_pb2.WatchTransfersResponse(transfer=transfer)
        finally:
            await self._clean()

    async def ReleaseTransfer(
        self, request: admin_pb2.ReleaseTransferRequest, context: Any
    ) -> admin_pb2.ReleaseTransferResponse:
        answer = admin_pb2.ReleaseTransferResponse()
        answer.transfer.waits_for = str(len(request.reason))
        return answer

    async def _clean(self) -> None:
        self.cleaning.set()
        await self.may_clean.wait()
        self.cleaned += 1


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
async def server(work: Work) -> AsyncIterator[ControlServer]:
    server = ControlServer(ServerConfig(), "decode", [SERVICE])
    admin_pb2_grpc.add_AdminServiceServicer_to_server(work, server.server)
    await server.start()
    yield server
    work.may_clean.set()
    await server.stop(0)


@pytest.fixture
async def channel(server: ControlServer) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.aio_channel(server.endpoint, Timeouts(), Sizes()) as channel:
        yield channel


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return int((await health_pb2_grpc.HealthStub(channel).Check(request)).status)


async def test_a_server_is_alive_at_once_and_ready_when_told(
    server: ControlServer, channel: grpc.aio.Channel
) -> None:
    assert await health_of(channel, "") == SERVING
    assert await health_of(channel, SERVICE) == NOT_SERVING
    assert (server.ready, server.reason) == (False, "starting")
    watch = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service=SERVICE)
    )
    assert (await watch.read()).status == NOT_SERVING
    server.set_ready(True)
    assert (await watch.read()).status == SERVING
    assert (server.ready, server.reason) == (True, "")
    server.set_ready(False, "engine stuck")
    assert (await watch.read()).status == NOT_SERVING
    assert await health_of(channel, SERVICE) == NOT_SERVING
    assert (server.ready, server.reason) == (False, "engine stuck")
    assert await health_of(channel, "") == SERVING
    watch.cancel()


async def test_health_of_a_service_that_is_not_served_is_not_found(
    channel: grpc.aio.Channel,
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        await health_of(channel, "pd_grpc.v1.DecodeService")
    assert rpc.read_error(refused.value).code is Code.NOT_FOUND


async def test_reflection_lists_every_service_and_describes_ours(
    channel: grpc.aio.Channel,
) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = {s.name for s in (await call.read()).list_services_response.service}
    assert listed == {
        SERVICE,
        "grpc.channelz.v1.Channelz",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    for name in listed:
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
    call.cancel()


async def test_channelz_tells_of_the_server(
    server: ControlServer, channel: grpc.aio.Channel
) -> None:
    stub = channelz_pb2_grpc.ChannelzStub(channel)
    found = await stub.GetServers(channelz_pb2.GetServersRequest())
    assert found.server
    top = await stub.GetTopChannels(channelz_pb2.GetTopChannelsRequest())
    assert server.endpoint in " ".join(c.data.target for c in top.channel)


async def test_a_method_nobody_serves_is_unimplemented(channel: grpc.aio.Channel) -> None:
    left_out = admin_pb2_grpc.AdminServiceStub(channel).GetServerInfo
    nowhere = channel.unary_unary("/pd_grpc.v1.Nowhere/Nothing", bytes, bytes)
    for call in (left_out(admin_pb2.GetServerInfoRequest()), nowhere(b"")):
        with pytest.raises(grpc.RpcError) as refused:
            await call
        assert rpc.read_error(refused.value).code is Code.UNIMPLEMENTED


async def test_a_port_in_use_is_an_error_that_names_it(server: ControlServer) -> None:
    second = ControlServer(ServerConfig(port=server.port), "decode", [SERVICE])
    with pytest.raises(rpc.PortInUse, match=rf"127\.0\.0\.1:{server.port}"):
        await second.start()
    await second.stop(0)


async def test_a_server_is_named_and_reached_as_configured_or_as_bound() -> None:
    plain = ControlServer(ServerConfig(), "decode", [])
    port = plain.bind()
    assert port == plain.bind() == plain.port
    assert (plain.name, plain.endpoint) == (f"decode-{port}", f"127.0.0.1:{port}")
    told = ControlServer(ServerConfig(name="d0", advertise="d0.local:9"), "decode", [])
    assert (told.name, told.endpoint) == ("d0", "d0.local:9")
    for server in (plain, told):
        await server.stop(0)


async def test_a_prompt_of_a_million_tokens_passes_and_more_than_16_mib_does_not(
    channel: grpc.aio.Channel,
) -> None:
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    length = 16 * MIB - 64
    request = admin_pb2.ReleaseTransferRequest(reason="x" * length)
    assert (await stub.ReleaseTransfer(request)).transfer.waits_for == str(length)
    with pytest.raises(grpc.RpcError) as refused:
        await stub.ReleaseTransfer(admin_pb2.ReleaseTransferRequest(reason="x" * (16 * MIB + 1)))
    fault = rpc.read_error(refused.value)
    assert isinstance(fault, TransportFault)
    assert fault.code is Code.RESOURCE_EXHAUSTED


async def test_a_stop_lets_what_runs_finish_and_refuses_what_is_new(
    server: ControlServer, channel: grpc.aio.Channel, work: Work
) -> None:
    server.set_ready(True)
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    running = asyncio.ensure_future(stub.Drain(admin_pb2.DrainRequest()))
    await work.begun.wait()
    health = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service=SERVICE)
    )
    assert (await health.read()).status == SERVING

    stopping = asyncio.create_task(server.stop(30))
    assert (await health.read()).status == NOT_SERVING
    with pytest.raises(grpc.RpcError) as ended:
        await health.read()
    fault = rpc.read_error(ended.value)
    assert isinstance(fault, Fault) and fault.reason is Reason.DRAINING
    with pytest.raises(grpc.RpcError) as refused:
        await stub.Drain(admin_pb2.DrainRequest())
    assert rpc.read_error(refused.value).code is Code.UNAVAILABLE
    assert not stopping.done()

    work.finish.set()
    assert (await running).transfers == 7
    await stopping
    assert work.cleaned == 1
    server.set_ready(True)
    assert (server.ready, server.reason) == (False, "stopping")


async def test_f53_a_stop_returns_only_when_a_cancelled_handler_has_cleaned_up(
    server: ControlServer, channel: grpc.aio.Channel, work: Work
) -> None:
    work.may_clean.clear()
    running = asyncio.ensure_future(
        admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest())
    )
    await work.begun.wait()
    stopping = asyncio.create_task(server.stop(0))
    await work.cleaning.wait()
    with pytest.raises(grpc.RpcError):
        await running
    assert server.handlers.running == 1
    assert not stopping.done()
    work.may_clean.set()
    await stopping
    assert (work.cleaned, server.handlers.running) == (1, 0)


@pytest.mark.parametrize("how", ["cancel", "deadline", "stop"])
async def test_f52_a_stream_that_is_cut_short_cleans_up_before_its_handler_counts_as_done(
    server: ControlServer, channel: grpc.aio.Channel, work: Work, how: str
) -> None:
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    timeout = 0.2 if how == "deadline" else None
    call = stub.WatchTransfers(admin_pb2.WatchTransfersRequest(), timeout=timeout)
    await call.read()
    assert server.handlers.running == 1
    if how == "cancel":
        call.cancel()
    if how == "stop":
        await server.stop(30)
    await server.handlers.drained()
    assert work.cleaned == 1


async def test_a_watcher_that_has_stopped_reading_does_not_hold_a_stop_for_its_grace(
    server: ControlServer, channel: grpc.aio.Channel, work: Work
) -> None:
    work.ballast = "x" * (15 * MIB)  # more than flow control lets through unread
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    call = stub.WatchTransfers(admin_pb2.WatchTransfersRequest())
    await call.read()
    await work.again.wait()
    await asyncio.wait_for(server.stop(3600), LIMIT_S)
    assert (work.cleaned, server.handlers.running) == (1, 0)


async def test_a_server_that_never_started_stops() -> None:
    await ControlServer(ServerConfig(), "router", []).stop(0)
