"""Deadlines, budgets and channels as every server and caller gets them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from pd_grpc.conformance.router.line import Line
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import ServerConfig, Sizes, Timeouts
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc
from tests.lines import line_to

TIMEOUTS = Timeouts(request_budget_s=300.0, hop_margin_s=0.1)


class Deadlines(admin_pb2_grpc.AdminServiceServicer):
    """Notes what is left of each call."""

    def __init__(self) -> None:
        self.left: float | None = None
        self.budget = -1.0

    async def Drain(self, request: Any, context: Any) -> admin_pb2.DrainResponse:
        self.left, self.budget = rpc.time_left(context), rpc.budget_of(context, TIMEOUTS)
        return admin_pb2.DrainResponse()


@pytest.fixture
def deadlines() -> Deadlines:
    return Deadlines()


@pytest.fixture
async def endpoint(deadlines: Deadlines) -> AsyncIterator[str]:
    server = grpc.aio.server(options=rpc.server_options(ServerConfig()))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(deadlines, server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    yield rpc.address("127.0.0.1", port)
    await server.stop(None)


@pytest.fixture
async def stub(endpoint: str) -> AsyncIterator[admin_pb2_grpc.AdminServiceStub]:
    async with rpc.aio_channel(endpoint, TIMEOUTS, Sizes()) as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


async def test_a_budget_is_what_the_caller_gives_less_the_margin(
    stub: admin_pb2_grpc.AdminServiceStub, deadlines: Deadlines
) -> None:
    await stub.Drain(admin_pb2.DrainRequest(), timeout=30)
    assert deadlines.left is not None and 20 < deadlines.left <= 30
    assert deadlines.budget == pytest.approx(deadlines.left - 0.1, abs=0.05)


@pytest.mark.parametrize("timeout_s", [0.7, 7.778, 77.77, 123.4, 2345.6])
async def test_a_deadline_that_grpc_rounds_up_on_its_way_is_never_overstated(
    stub: admin_pb2_grpc.AdminServiceStub, deadlines: Deadlines, timeout_s: float
) -> None:
    begun = time.monotonic()
    await stub.Drain(admin_pb2.DrainRequest(), timeout=timeout_s)
    least = 0.9 * timeout_s - (time.monotonic() - begun)
    assert deadlines.left is not None and least < deadlines.left <= timeout_s


async def test_a_call_without_a_deadline_has_the_default_budget(
    stub: admin_pb2_grpc.AdminServiceStub, deadlines: Deadlines
) -> None:
    await stub.Drain(admin_pb2.DrainRequest())
    assert (deadlines.left, deadlines.budget) == (None, 300.0)


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1:8"), ("::1", "[::1]:8"), ("pod.local", "pod.local:8")],
)
def test_an_address_is_written_as_grpc_reads_it(host: str, shown: str) -> None:
    assert rpc.address(host, 8) == shown


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("203.0.113.1", r"203\.0\.113\.1:0: Cannot assign requested address"),
        ("no-such-host.invalid", r"no-such-host\.invalid:0: .*[Nn]ame"),
    ],
)
async def test_an_address_that_cannot_be_bound_is_said_in_the_systems_words(
    host: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    server = grpc.aio.server(options=rpc.server_options(ServerConfig()))
    with pytest.raises(rpc.PortInUse, match=f"^cannot listen on {says}"):
        rpc.bind(server, host, 0)
    await server.stop(None)
    assert capfd.readouterr().err == "", "grpc was asked"


async def test_a_port_in_use_is_said_in_the_systems_words(
    capfd: pytest.CaptureFixture[str],
) -> None:
    server = grpc.aio.server(options=rpc.server_options(ServerConfig()))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(rpc.PortInUse) as raised:
            rpc.bind(server, "127.0.0.1", port)
    assert str(raised.value) == f"cannot listen on 127.0.0.1:{port}: Address already in use"
    await server.stop(None)
    assert capfd.readouterr().err == "", "grpc was asked"


class LateLine(Line):
    """Takes every connection late, as a peer that is busy."""

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(TIMEOUTS.connect_s / 2)  # Longer than any back-off of a channel.
        await super().take(reader, writer)


async def test_a_busy_peer_that_takes_a_connection_late_is_not_lost(
    endpoint: str, deadlines: Deadlines
) -> None:
    async with (
        line_to(endpoint, LateLine("127.0.0.1:0")) as line,
        rpc.aio_channel(line.endpoint, TIMEOUTS, Sizes()) as channel,
    ):
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        await stub.Drain(admin_pb2.DrainRequest(), timeout=60)
    assert deadlines.left is not None


@pytest.mark.parametrize("heartbeat_s", [0.8, 2.5, 5.0])
def test_a_frozen_peer_is_found_within_two_heartbeats_by_either_end(heartbeat_s: float) -> None:
    channel = dict(rpc.channel_options(Timeouts(heartbeat_s=heartbeat_s), Sizes()))
    server = dict(rpc.server_options(ServerConfig(heartbeat_s=heartbeat_s)))
    for options in (channel, server):
        patience_ms = options["grpc.http2.ping_timeout_ms"]
        assert patience_ms == options["grpc.keepalive_timeout_ms"]
        # A ping that has just been answered, the look that finds that, and the next one.
        assert 2 * options["grpc.keepalive_time_ms"] + patience_ms < 2000 * heartbeat_s
        assert options["grpc.http2.max_pings_without_data"] == 0


def test_a_short_heartbeat_does_not_make_a_busy_peer_a_lost_one() -> None:
    options = dict(rpc.channel_options(Timeouts(heartbeat_s=0.1), Sizes()))
    assert options["grpc.http2.ping_timeout_ms"] >= 300


def test_a_server_tolerates_the_pings_of_our_channels() -> None:
    server = dict(rpc.server_options(ServerConfig()))
    channel = dict(rpc.channel_options(Timeouts(), Sizes()))
    allowed_ms = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert allowed_ms <= channel["grpc.keepalive_time_ms"]
    assert server["grpc.keepalive_permit_without_calls"] == 1
    assert server["grpc.so_reuseport"] == 0
