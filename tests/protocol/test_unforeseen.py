"""What nobody foresaw in a handler reaches neither the caller nor the log in its own words."""

from __future__ import annotations

import logging
from typing import Any

import grpc.aio
import pytest

from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import ServerConfig, Sizes, Timeouts
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.serving import ControlServer
from pd_grpc.telemetry.logs import LOGGER, HumanFormatter, JsonFormatter
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc

PROMPT = "the words of a prompt"


class Broken(admin_pb2_grpc.AdminServiceServicer):
    """Raises what it was given, in a call and in a stream."""

    async def Drain(self, request: Any, context: Any) -> admin_pb2.DrainResponse:
        try:
            raise KeyError(PROMPT)
        except KeyError as error:
            raise RuntimeError(f"while answering {PROMPT}") from error

    async def WatchTransfers(self, request: Any, context: Any) -> Any:
        yield admin_pb2.WatchTransfersResponse()
        raise ValueError(PROMPT)


async def test_its_type_is_told_and_where_it_was_raised(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, LOGGER)
    server = ControlServer(ServerConfig(), "decode", ["pd_grpc.v1.AdminService"])
    admin_pb2_grpc.add_AdminServiceServicer_to_server(Broken(), server.server)
    await server.start()
    async with rpc.aio_channel(server.endpoint, Timeouts(), Sizes()) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        for name, call in (
            ("RuntimeError", stub.Drain(admin_pb2.DrainRequest(), timeout=60)),
            ("ValueError", _whole(stub.WatchTransfers(admin_pb2.WatchTransfersRequest()))),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            fault = rpc.read_error(raised.value)
            assert isinstance(fault, Fault) and fault.reason is Reason.ENGINE_ERROR
            assert name in fault.message and PROMPT not in str(raised.value)
    await server.stop(0)
    lines = [record for record in caplog.records if record.exc_info]
    assert len(lines) == 2
    for formatter in (HumanFormatter(), JsonFormatter()):
        written = [formatter.format(record) for record in lines]
        assert "KeyError" in written[0] and "RuntimeError" in written[0]
        assert "in Drain" in written[0] and "in WatchTransfers" in written[1]
        assert PROMPT not in "".join(written)
    assert not [record for record in caplog.records if PROMPT in record.getMessage()]


async def _whole(stream: Any) -> None:
    async for _ in stream:
        pass
