"""Every call is recorded at both ends, whatever its shape, its kind and its end."""

from __future__ import annotations

import itertools

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from pd_grpc.telemetry.rpc_calls import MOST_PEERS
from tests.telemetry.recorder import Recorder, id_of, parent_of
from tests.telemetry.rpc_echo import CALLERS, SHAPES, calls_of, echo_server, method_of
from tests.waiting import until

TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
TRACED = (("traceparent", f"00-{TRACE:032x}-{PARENT:016x}-01"), ("x-other-bin", b"\x00\xff"))

EACH = [
    pytest.param(*each, id="-".join(each)) for each in itertools.product(CALLERS, CALLERS, SHAPES)
]
"""Client, server, shape."""


async def _recorded(
    recorder: Recorder, client: str, server: str, shape: str, what: bytes, timeout: float = 20
) -> tuple[str, ReadableSpan, ReadableSpan]:
    """A traced call's status, and its spans at the caller and at the server."""
    async with echo_server(server, recorder) as (endpoint, echo):
        caller = CALLERS[client](endpoint, calls_of(recorder, "client"), TRACED)
        if what == b"cancel":
            await caller.cancel(shape, echo)
            status = "CANCELLED"
        else:
            status = await caller.call(shape, what, timeout)
        await until(lambda: len(recorder.spans) == 2)
        await caller.close()
        (served,) = [span for span in recorder.spans if span.kind is SpanKind.SERVER]
        (made,) = [span for span in recorder.spans if span.kind is SpanKind.CLIENT]
        assert set(echo.current) == {id_of(served)}, "a handler runs in the context of its call"
    for span in (made, served):
        assert span.name == method_of(shape)
        assert span.attributes is not None
        assert span.attributes["rpc.system.name"] == "grpc"
        assert span.attributes["rpc.method"] == method_of(shape)
        assert span.context is not None and span.context.trace_id == TRACE
    host, _, port = endpoint.rpartition(":")
    assert made.attributes is not None
    assert (made.attributes["server.address"], made.attributes["server.port"]) == (host, int(port))
    assert parent_of(made) == PARENT
    assert parent_of(served) == id_of(made)
    return status, made, served


@pytest.mark.parametrize(("client", "server", "shape"), EACH)
async def test_a_call_that_is_answered(client: str, server: str, shape: str) -> None:
    recorder = Recorder()
    status, made, served = await _recorded(recorder, client, server, shape, b"ok")
    assert status == "OK"
    for span, metric in ((made, "client"), (served, "server")):
        assert span.attributes is not None
        assert span.attributes["rpc.response.status_code"] == "OK"
        assert span.attributes["pd.outcome"] == "ok"
        assert "error.type" not in span.attributes
        assert span.status.status_code is StatusCode.UNSET
        ((labels, point),) = recorder.points(f"rpc.{metric}.call.duration")
        assert labels["rpc.method"] == method_of(shape)
        assert labels["rpc.response.status_code"] == "OK"
        assert point.count == 1
        assert span.start_time is not None and span.end_time is not None
        assert point.sum == pytest.approx((span.end_time - span.start_time) / 1e9, abs=1e-6)


@pytest.mark.parametrize(("client", "server", "shape"), EACH)
async def test_a_call_that_fails_says_code_and_reason(client: str, server: str, shape: str) -> None:
    recorder = Recorder()
    status, made, served = await _recorded(recorder, client, server, shape, b"fail")
    assert status == "FAILED_PRECONDITION"
    assert made.attributes is not None and served.attributes is not None
    assert made.status.status_code is StatusCode.ERROR
    assert made.attributes["error.type"] == "FAILED_PRECONDITION"
    assert served.status.status_code is StatusCode.UNSET, (
        "of FAILED_PRECONDITION the caller is to judge"
    )
    for span in (made, served):
        assert span.attributes is not None
        assert span.attributes["rpc.response.status_code"] == "FAILED_PRECONDITION"
        assert span.attributes["pd.outcome"] == "STALE_EPOCH"
    ((labels, _),) = recorder.points("rpc.client.call.duration")
    assert labels["error.type"] == "FAILED_PRECONDITION"


@pytest.mark.parametrize(("client", "server", "shape"), EACH)
async def test_a_handler_that_breaks(client: str, server: str, shape: str) -> None:
    status, made, served = await _recorded(Recorder(), client, server, shape, b"crash")
    assert status == "UNKNOWN"
    for span in (made, served):
        assert span.attributes is not None
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes["rpc.response.status_code"] == "UNKNOWN"
        assert span.attributes["error.type"] == "UNKNOWN"


@pytest.mark.parametrize(("client", "server", "shape"), EACH)
async def test_a_call_that_is_cancelled(client: str, server: str, shape: str) -> None:
    _, made, served = await _recorded(Recorder(), client, server, shape, b"cancel")
    for span in (made, served):
        assert span.attributes is not None
        assert span.attributes["rpc.response.status_code"] == "CANCELLED"
        assert span.attributes["pd.outcome"] == "CANCELLED"
    assert made.status.status_code is StatusCode.ERROR
    assert served.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(("client", "server", "shape"), EACH)
async def test_a_call_whose_time_is_over(client: str, server: str, shape: str) -> None:
    status, made, served = await _recorded(Recorder(), client, server, shape, b"wait", timeout=1.5)
    assert status == "DEADLINE_EXCEEDED"
    assert made.attributes is not None and served.attributes is not None
    assert made.attributes["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
    assert made.attributes["error.type"] == "DEADLINE_EXCEEDED"
    # Whose timer is first, the caller's or the server's, is chance.
    ends = {"DEADLINE_EXCEEDED", "CANCELLED"}
    assert served.attributes["rpc.response.status_code"] in ends


@pytest.mark.parametrize("client", CALLERS)
async def test_a_peer_that_is_not_there(client: str) -> None:
    recorder = Recorder()
    caller = CALLERS[client]("127.0.0.1:1", calls_of(recorder, "client"), TRACED)
    for shape in SHAPES:
        assert await caller.call(shape, b"ok") == "UNAVAILABLE"
    await until(lambda: len(recorder.spans) == len(SHAPES))
    await caller.close()
    for span in recorder.spans:
        assert span.attributes is not None
        assert span.attributes["error.type"] == "UNAVAILABLE"


@pytest.mark.parametrize("kind", CALLERS)
async def test_a_call_that_is_no_requests_has_a_duration_alone(kind: str) -> None:
    recorder = Recorder()
    async with echo_server(kind, recorder) as (endpoint, _):
        caller = CALLERS[kind](endpoint, calls_of(recorder, "client"))
        assert await caller.call("unary_unary", b"ok") == "OK"
        await until(lambda: bool(recorder.points("rpc.server.call.duration")))
        await caller.close()
    assert not recorder.spans
    assert recorder.points("rpc.client.call.duration")


async def test_peers_beyond_a_number_are_not_told_apart() -> None:
    recorder = Recorder()
    calls = calls_of(recorder, "client")
    for port in range(1, 2001):
        call, _ = calls.made("pd_grpc.v1.DecodeService/Allocate", f"[::1]:{port}", None)
        call.ended("OK")
    points = recorder.points("rpc.client.call.duration")
    assert len(points) == MOST_PEERS + 1
    assert sum(point.count for _, point in points) == 2000
    assert {labels.get("server.address") for labels, _ in points} == {"::1", None}


async def test_a_peer_that_never_answered_has_no_series_of_its_own() -> None:
    recorder = Recorder()
    calls = calls_of(recorder, "client")

    def end(host: str, code: str) -> None:
        call, _ = calls.made("pd_grpc.v1.DecodeService/Allocate", f"{host}:1", None)
        call.ended(code)

    for number in range(100):
        end(f"named-by-a-caller-{number}", "UNAVAILABLE")
    for code in ("UNAVAILABLE", "OK", "UNAVAILABLE"):
        end("d0", code)
    found = {
        (labels.get("server.address"), labels["rpc.response.status_code"]): point.count
        for labels, point in recorder.points("rpc.client.call.duration")
    }
    assert found == {(None, "UNAVAILABLE"): 101, ("d0", "OK"): 1, ("d0", "UNAVAILABLE"): 1}
