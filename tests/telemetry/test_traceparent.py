"""The trace context that a caller sends, over real servers and with a stub as any client has it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from pd_grpc.protocol.sampling import Sampling
from pd_grpc.telemetry.tracing import extract, inject, trace_id
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from tests.cluster import Cluster, cluster
from tests.system.asking import request

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"
KEPT: dict[str, Any] = {"traces_kept": 256, "router_settings": {"traces_kept": 256}}
SAMPLING = Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)

MALFORMED = {
    "empty": "",
    "nonsense": "nonsense",
    "no flags": f"00-{TRACE}-{SPAN}",
    "half the flags": f"00-{TRACE}-{SPAN}-1",
    "flags that are no hex": f"00-{TRACE}-{SPAN}-zz",
    "no version": f"{TRACE}-{SPAN}-01",
    "half a version": f"0-{TRACE}-{SPAN}-01",
    "a version that is forbidden": f"ff-{TRACE}-{SPAN}-01",
    "capitals": f"00-{TRACE.upper()}-{SPAN}-01",
    "a trace of zeros": f"00-{'0' * 32}-{SPAN}-01",
    "a parent of zeros": f"00-{TRACE}-{'0' * 16}-01",
    "a trace that is too short": f"00-{TRACE[:-1]}-{SPAN}-01",
    "a trace that is too long": f"00-{TRACE}0-{SPAN}-01",
    "a parent that is too short": f"00-{TRACE}-{SPAN[:-1]}-01",
    "a trace that is no hex": f"00-{TRACE[:-1]}g-{SPAN}-01",
    "more than version 00 has": f"00-{TRACE}-{SPAN}-01-more",
    "a dash at the end": f"00-{TRACE}-{SPAN}-01-",
    "blanks for dashes": f"00 {TRACE} {SPAN} 01",
    "no dash between the ids": f"00-{TRACE}{SPAN}-01",
    "two in one": f"{GOOD},{GOOD}",
    "four thousand characters": f"00-{'a' * 4000}-{SPAN}-01",
}
SOUND = {
    "as it should be": (GOOD, TRACE),
    "blanks around it": (f" {GOOD} ", TRACE),
    "flags of a later level": (f"00-{TRACE}-{SPAN}-ff", TRACE),
    "a later version": (f"cc-{TRACE}-{SPAN}-01", TRACE),
    "a later version that has more": (f"cc-{TRACE}-{SPAN}-01-what-is-that", TRACE),
}
SPANS = {
    ("pd.request", "router"),
    ("pd.route", "router"),
    ("pd.prefill_request", "p0"),
    ("pd.queue", "p0"),
    ("pd.prepare", "p0"),
    ("pd.compute", "p0"),
    ("pd.first_token", "p0"),
    ("pd.reserve", "d0"),
    ("pd.receive", "d0"),
    ("pd.decode", "d0"),
}


@pytest.fixture
async def servers() -> AsyncIterator[Cluster]:
    async with cluster(**KEPT) as running:
        yield running


async def ask(servers: Cluster, name: str, *metadata: tuple[str, str | bytes]) -> None:
    """A whole answer, by a channel and a stub that nothing of ours has touched."""
    async with grpc.aio.insecure_channel(servers.router.endpoint) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        message = request([5, 6, 7, 8], SAMPLING, name)
        tokens = [
            token
            async for part in stub.Generate(message, timeout=60, metadata=metadata)
            for token in part.token_ids
        ]
    assert len(tokens) == 3


async def trace_of(servers: Cluster, name: str) -> tuple[str, set[tuple[str, str]]]:
    """The id of a request's trace, and what work there is in it."""
    async with grpc.aio.insecure_channel(servers.router.endpoint) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        told = await admin.GetTrace(admin_pb2.GetTraceRequest(id=name, peers=True), timeout=60)
    (found,) = {span.trace_id for span in told.spans}
    return found, {(span.name, span.instance) for span in told.spans}


async def test_a_malformed_one_is_ignored_and_a_new_trace_begins(servers: Cluster) -> None:
    traces = []
    for n, (what, sent) in enumerate(MALFORMED.items()):
        await ask(servers, f"r-{n}", ("traceparent", sent))
        await servers.settled()
        found, spans = await trace_of(servers, f"r-{n}")
        assert found != TRACE and len(found) == 32, what
        assert spans >= SPANS, what
        traces.append(found)
    assert len(set(traces)) == len(MALFORMED), "each began its own"


async def test_a_sound_one_of_any_client_is_kept_through_all_servers(servers: Cluster) -> None:
    for n, (what, (sent, trace)) in enumerate(SOUND.items()):
        # One trace each, or they would be found together.
        own = f"{n:02x}{trace[2:]}"
        await ask(servers, f"r-{n}", ("traceparent", sent.replace(trace, own)))
        await servers.settled()
        found, spans = await trace_of(servers, f"r-{n}")
        assert found == own, what
        assert spans >= SPANS, what


async def test_one_in_binary_metadata_is_none(servers: Cluster) -> None:
    await ask(servers, "r-bin", ("traceparent-bin", GOOD.encode()), ("tracestate-bin", b"\0\xff"))
    await servers.settled()
    found, _ = await trace_of(servers, "r-bin")
    assert found != TRACE


@pytest.mark.parametrize(
    "state",
    [
        "no member",
        "=",
        "a=1,a=2",
        "A=1",
        "a=" + "x" * 600,
        ",".join(f"k{n}=1" for n in range(33)),
        "a=1," + ",".join(f"k{n}={'x' * 100}" for n in range(10)),
    ],
)
def test_a_tracestate_that_cannot_be_passed_on_is_dropped_without_a_word(
    state: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        context = extract([("traceparent", GOOD), ("tracestate", state)])
        assert inject(context) == [("traceparent", GOOD)]
    assert trace_id(context) == TRACE
    assert caplog.records == []


@pytest.mark.parametrize(
    "state", ["a=1", "a=1,b=2", " a=1 ,, b=2 ", "tenant@vendor=x y", "k0=" + "x" * 256]
)
def test_a_sound_tracestate_is_passed_on(state: str) -> None:
    context = extract([("traceparent", GOOD), ("tracestate", state)])
    members = [member.strip() for member in state.split(",") if member.strip()]
    assert dict(inject(context))["tracestate"].split(",") == members
