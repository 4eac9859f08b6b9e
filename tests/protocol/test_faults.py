"""The status table row by row: code, what a client sees, retry, and details that survive the wire.

The rows are written out again here, from the table of the protocol: the tests read no expectation
out of the code they check.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import ServerConfig, Sizes, Timeouts
from pd_grpc.protocol.faults import (
    MAX_MESSAGE_BYTES,
    MAX_VALUE_BYTES,
    STATUS_TABLE,
    Code,
    Fault,
    Quota,
    Reason,
    Retry,
    TransportFault,
    bad_request,
    read_status,
    stage_deadline,
    transport_fault,
)
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc

SAME = "same"

# reason: (code, code a client sees, retry)
ROWS = {
    "BAD_REQUEST": ("INVALID_ARGUMENT", SAME, "never"),
    "TOO_LARGE": ("INVALID_ARGUMENT", SAME, "never"),
    "HANDOFF_MISMATCH": ("INVALID_ARGUMENT", "INTERNAL", "never"),
    "NO_BLOCKS": ("RESOURCE_EXHAUSTED", SAME, "other"),
    "QUEUE_FULL": ("RESOURCE_EXHAUSTED", SAME, "other"),
    "DUPLICATE_TRANSFER": ("ALREADY_EXISTS", SAME, "never"),
    "DUPLICATE_REQUEST": ("ALREADY_EXISTS", SAME, "never"),
    "STALE_EPOCH": ("FAILED_PRECONDITION", "UNAVAILABLE", "other"),
    "WRONG_INSTANCE": ("FAILED_PRECONDITION", "UNAVAILABLE", "other"),
    "STALE_ATTEMPT": ("ABORTED", SAME, "never"),
    "SUPERSEDED": ("ABORTED", SAME, "never"),
    "RELEASED": ("ABORTED", SAME, "never"),
    "UNKNOWN_TRANSFER": ("NOT_FOUND", "UNAVAILABLE", "other"),
    "LEASE_EXPIRED": ("NOT_FOUND", "UNAVAILABLE", "other"),
    "NO_SESSION": ("FAILED_PRECONDITION", "INTERNAL", "never"),
    "WRONG_STATE": ("FAILED_PRECONDITION", "INTERNAL", "never"),
    "LAYOUT_MISMATCH": ("FAILED_PRECONDITION", "UNAVAILABLE", "other"),
    "FEATURE": ("UNIMPLEMENTED", SAME, "never"),
    "KV_CORRUPT": ("DATA_LOSS", "UNAVAILABLE", "other"),
    "DRAINING": ("UNAVAILABLE", SAME, "other"),
    "NO_INSTANCE": ("UNAVAILABLE", SAME, "other"),
    "PREFILL_LOST": ("UNAVAILABLE", SAME, "other"),
    "DECODE_LOST": ("UNAVAILABLE", SAME, "other"),
    "ENGINE_STUCK": ("UNAVAILABLE", SAME, "other"),
    "SENDER_STUCK": ("UNAVAILABLE", SAME, "other"),
    "ENGINE_ERROR": ("INTERNAL", SAME, "never"),
    "CLIENT_GONE": ("CANCELLED", SAME, "never"),
    "CLIENT_ABSENT": ("DEADLINE_EXCEEDED", SAME, "never"),
    "STAGE_DEADLINE": ("DEADLINE_EXCEEDED", SAME, "never"),
    "CREDENTIALS": ("UNAUTHENTICATED", SAME, "never"),
    "ROLE": ("PERMISSION_DENIED", SAME, "never"),
    "NOT_OWNER": ("PERMISSION_DENIED", SAME, "never"),
}


def with_everything(reason: Reason) -> Fault:
    """A fault that carries every kind of detail."""
    return Fault(
        reason,
        f"why: {reason.value} – é",
        {"stage": "transfer", "ours": "16", "theirs": "32"},
        (FieldError("sampling.top_p", "must be above 0"), FieldError("ref.attempt", "from 1")),
        retry_after_s=0.25,
        quota=Quota(needed=12, free=3),
    )


def facts(fault: Fault) -> tuple[Any, ...]:
    """Everything a fault says, for comparing."""
    return (
        fault.reason,
        fault.code,
        fault.retry,
        fault.message,
        dict(fault.metadata),
        tuple(fault.fields),
        fault.retry_after_s,
        fault.quota,
    )


def test_every_reason_has_a_row() -> None:
    assert set(ROWS) == {reason.value for reason in STATUS_TABLE} == set(Reason.__members__)


@pytest.mark.parametrize(("reason", "row"), ROWS.items())
def test_a_reason_has_the_code_and_the_consequence_of_its_row(
    reason: str, row: tuple[str, str, str]
) -> None:
    code, client, retry = row
    fault = Fault(Reason[reason], "x")
    assert fault.code is Code[code]
    assert fault.retry is Retry(retry)
    assert fault.for_client().code is Code[code if client == SAME else client]
    assert str(fault) == f"{code} {reason}: x"


@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("for_client", [False, True])
def test_a_fault_read_from_its_status_says_the_same(reason: Reason, for_client: bool) -> None:
    fault = with_everything(reason)
    fault = fault.for_client() if for_client else fault
    read = read_status(status_pb2.Status.FromString(fault.status().SerializeToString()))
    assert isinstance(read, Fault)
    assert facts(read) == facts(fault)
    assert facts(read.for_client()) == facts(fault.for_client())


def test_codes_are_those_of_grpc() -> None:
    by_number = {code.value[0]: code.name for code in grpc.StatusCode}
    assert {int(code): code.name for code in Code} == by_number


def test_the_details_are_those_any_grpc_client_knows() -> None:
    status = with_everything(Reason.NO_BLOCKS).status()
    info, bad, retry, quota = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
        error_details_pb2.QuotaFailure(),
    )
    for packed, message in zip(status.details, (info, bad, retry, quota), strict=True):
        assert packed.Unpack(message)
    assert (info.domain, info.reason, info.metadata["ours"]) == ("pd_grpc", "NO_BLOCKS", "16")
    assert [v.field for v in bad.field_violations] == ["sampling.top_p", "ref.attempt"]
    assert retry.retry_delay.ToMilliseconds() == 250
    assert "12 blocks needed, 3 free" in quota.violations[0].description


def test_a_fault_carries_only_the_details_it_has() -> None:
    status = Fault(Reason.RELEASED, "given back").status()
    assert [detail.TypeName() for detail in status.details] == ["google.rpc.ErrorInfo"]
    read = read_status(status)
    assert isinstance(read, Fault)
    assert (read.fields, read.retry_after_s, read.quota) == ((), None, None)


def status_of(domain: str, reason: str, code: int = 14) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message="text")
    status.details.add().Pack(error_details_pb2.ErrorInfo(domain=domain, reason=reason))
    return status


@pytest.mark.parametrize(
    "status",
    [
        status_pb2.Status(code=14, message="text"),
        status_of("googleapis.com", "DRAINING"),
        status_of("pd_grpc", "INVENTED_LATER"),
        status_of("pd_grpc", "__class__"),
        status_of("", ""),
    ],
)
def test_a_status_that_is_not_ours_is_the_transports(status: status_pb2.Status) -> None:
    read = read_status(status)
    assert isinstance(read, TransportFault)
    assert (read.code, read.message, read.peer_lost) == (Code.UNAVAILABLE, "text", True)
    assert str(read) == "UNAVAILABLE: text"


def test_of_the_transport_unavailable_and_cancelled_mean_that_the_peer_is_lost() -> None:
    lost = [code for code in Code if TransportFault(code, "").peer_lost]
    assert lost == [Code.CANCELLED, Code.UNAVAILABLE]


def test_a_code_no_version_knows_is_unknown() -> None:
    read = read_status(status_pb2.Status(code=99))
    assert isinstance(read, TransportFault)
    assert read.code is Code.UNKNOWN


def test_a_detail_that_cannot_be_parsed_is_passed_over() -> None:
    status = Fault(Reason.DRAINING, "x").status()
    broken = status.details.add()
    broken.type_url = "type.googleapis.com/google.rpc.RetryInfo"
    broken.value = b"\xff\xff"
    read = read_status(status)
    assert isinstance(read, Fault)
    assert (read.reason, read.retry_after_s) == (Reason.DRAINING, None)


def test_a_retry_at_once_is_not_the_same_as_no_word_on_retrying() -> None:
    at_once = read_status(Fault(Reason.NO_BLOCKS, "x", retry_after_s=0.0).status())
    no_word = read_status(Fault(Reason.NO_BLOCKS, "x").status())
    assert isinstance(at_once, Fault) and isinstance(no_word, Fault)
    assert (at_once.retry_after_s, no_word.retry_after_s) == (0.0, None)


def test_a_bad_request_names_every_field_and_a_stage_deadline_its_stage() -> None:
    bad = bad_request([FieldError("a", "must be 1"), FieldError("b", "must be 2")])
    assert (bad.reason, bad.message) == (Reason.BAD_REQUEST, "a: must be 1; b: must be 2")
    assert [wrong.field for wrong in bad.fields] == ["a", "b"]
    late = stage_deadline("allocate")
    assert (late.reason, late.metadata["stage"]) == (Reason.STAGE_DEADLINE, "allocate")
    assert "'allocate'" in late.message
    assert "request" not in late.message, "it may be the stage's own time that is over"


# --- over real connections -----------------------------------------------------------------------


@dataclass
class Failing(admin_pb2_grpc.AdminServiceServicer):
    """Fails a call or a stream with the fault it is given."""

    fault: Fault

    async def Drain(self, request: Any, context: Any) -> admin_pb2.DrainResponse:
        await rpc.abort(context, self.fault)

    async def WatchTransfers(
        self, request: Any, context: Any
    ) -> AsyncIterator[admin_pb2.WatchTransfersResponse]:
        yield admin_pb2.WatchTransfersResponse()
        await rpc.abort(context, self.fault)


@pytest.fixture
async def failing() -> AsyncIterator[tuple[Failing, str]]:
    failing = Failing(Fault(Reason.DRAINING, ""))
    server = grpc.aio.server(options=rpc.server_options(ServerConfig()))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(failing, server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    yield failing, f"127.0.0.1:{port}"
    await server.stop(None)


async def test_each_row_survives_a_call_and_a_stream_of_the_aio_api(
    failing: tuple[Failing, str],
) -> None:
    servicer, endpoint = failing
    async with rpc.aio_channel(endpoint, Timeouts(), Sizes()) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        for reason in Reason:
            servicer.fault = with_everything(reason)
            with pytest.raises(grpc.RpcError) as call:
                await stub.Drain(admin_pb2.DrainRequest(), timeout=60)
            stream = stub.WatchTransfers(admin_pb2.WatchTransfersRequest(), timeout=60)
            assert await stream.read() == admin_pb2.WatchTransfersResponse()
            with pytest.raises(grpc.RpcError) as streamed:
                await stream.read()
            for error in (call.value, streamed.value):
                read = rpc.read_error(error)
                assert isinstance(read, Fault)
                assert facts(read) == facts(servicer.fault)


async def test_each_row_survives_a_future_and_a_stream_of_the_sync_api(
    failing: tuple[Failing, str],
) -> None:
    servicer, endpoint = failing
    with rpc.sync_channel(endpoint, Timeouts(), Sizes()) as channel:
        for reason in Reason:
            servicer.fault = with_everything(reason)
            for error in await asyncio.to_thread(sync_errors, channel):
                read = rpc.read_error(error)
                assert isinstance(read, Fault)
                assert facts(read) == facts(servicer.fault)


def sync_errors(channel: grpc.Channel) -> list[grpc.RpcError]:
    """What a future, and a stream after its first message, fail with."""
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    with pytest.raises(grpc.RpcError) as call:
        stub.Drain.future(admin_pb2.DrainRequest(), timeout=60).result()
    responses: Iterator[Any] = stub.WatchTransfers(admin_pb2.WatchTransfersRequest(), timeout=60)
    next(responses)
    with pytest.raises(grpc.RpcError) as streamed:
        next(responses)
    return [call.value, streamed.value]


async def test_the_status_is_what_the_standard_reader_of_rich_statuses_finds(
    failing: tuple[Failing, str],
) -> None:
    servicer, endpoint = failing
    servicer.fault = with_everything(Reason.QUEUE_FULL)
    with rpc.sync_channel(endpoint, Timeouts(), Sizes()) as channel:
        error: Any = (await asyncio.to_thread(sync_errors, channel))[0]
        assert rpc_status.from_call(error) == servicer.fault.status()


async def test_a_text_too_long_for_a_trailer_is_cut_and_the_reason_arrives(
    failing: tuple[Failing, str],
) -> None:
    servicer, endpoint = failing
    servicer.fault = Fault(Reason.ENGINE_ERROR, "\U0001f40d" * 50_000, {"field": "é" * 50_000})
    async with rpc.aio_channel(endpoint, Timeouts(), Sizes()) as channel:
        with pytest.raises(grpc.RpcError) as call:
            await admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest())
    read = rpc.read_error(call.value)
    assert isinstance(read, Fault)
    assert read.reason is Reason.ENGINE_ERROR
    assert read.message == "\U0001f40d" * (MAX_MESSAGE_BYTES // 4)
    assert read.metadata["field"] == "é" * (MAX_VALUE_BYTES // 2)


async def test_details_that_are_not_a_status_are_passed_over() -> None:
    class Garbled(admin_pb2_grpc.AdminServiceServicer):
        async def Drain(self, request: Any, context: Any) -> None:
            garbage = (("grpc-status-details-bin", b"\xff\xff\xff"),)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "proxy", trailing_metadata=garbage)

    server = grpc.aio.server(options=rpc.server_options(ServerConfig()))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(Garbled(), server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    async with rpc.aio_channel(f"127.0.0.1:{port}", Timeouts(), Sizes()) as channel:
        with pytest.raises(grpc.RpcError) as call:
            await admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest())
    read = rpc.read_error(call.value)
    assert (read.code, read.message) == (Code.UNAVAILABLE, "proxy")
    assert isinstance(read, TransportFault)
    await server.stop(None)


async def test_a_peer_that_is_not_there_is_lost_in_both_apis() -> None:
    server = grpc.aio.server(options=rpc.server_options(ServerConfig()))
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.stop(None)
    endpoint = f"127.0.0.1:{port}"
    async with rpc.aio_channel(endpoint, Timeouts(), Sizes()) as aio:
        with pytest.raises(grpc.RpcError) as one:
            await admin_pb2_grpc.AdminServiceStub(aio).Drain(admin_pb2.DrainRequest(), timeout=60)
    with rpc.sync_channel(endpoint, Timeouts(), Sizes()) as channel:
        future = admin_pb2_grpc.AdminServiceStub(channel).Drain.future(
            admin_pb2.DrainRequest(), timeout=60
        )
        other = await asyncio.to_thread(future.exception)
    for error in (one.value, other):
        read = rpc.read_error(error)
        assert isinstance(read, TransportFault)
        assert read.peer_lost


# --- statuses that are not ours -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (Code.UNAVAILABLE, Reason.DECODE_LOST),
        (Code.CANCELLED, Reason.DECODE_LOST),
        (Code.DEADLINE_EXCEEDED, Reason.STAGE_DEADLINE),
        (Code.RESOURCE_EXHAUSTED, Reason.TOO_LARGE),
        (Code.UNIMPLEMENTED, Reason.WRONG_INSTANCE),
        (Code.UNKNOWN, Reason.ENGINE_ERROR),
        (Code.INTERNAL, Reason.ENGINE_ERROR),
    ],
)
def test_a_bare_status_means_the_same_to_every_caller(code: Code, reason: Reason) -> None:
    bare = TransportFault(code, "words of grpc")
    fault = transport_fault(bare, "decode instance d1", Reason.DECODE_LOST, "allocate")
    assert fault.reason is reason
    assert "allocate" in fault.message
    if reason is Reason.WRONG_INSTANCE:
        assert fault.metadata == {"meant": "decode instance d1", "here": ""}
    if reason is not Reason.STAGE_DEADLINE:
        assert "decode instance d1" in fault.message and "words of grpc" in fault.message


async def test_a_fault_that_was_told_lets_go_of_what_raised_it(
    failing: tuple[Failing, str],
) -> None:
    """It may be remembered for long, and what raised it holds the request."""
    servicer, endpoint = failing
    try:
        int("none")
    except ValueError:
        try:
            raise servicer.fault
        except Fault as fault:
            assert fault.__traceback__ is not None and fault.__context__ is not None
    async with rpc.aio_channel(endpoint, Timeouts(), Sizes()) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            await stub.Drain(admin_pb2.DrainRequest(), timeout=60)
    assert servicer.fault.__traceback__ is None and servicer.fault.__context__ is None
