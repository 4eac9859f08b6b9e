"""The router among its instances and its operators: readiness, drain, admin, traces."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.messages import duration, seconds
from pd_grpc.router.intake import RoutableRequest
from pd_grpc.router.legs import AttemptLegs
from pd_grpc.router.recovery import RecoveringRequest
from pd_grpc.router.runtime import RoutedCall
from pd_grpc.router.server import start_router
from pd_grpc.v1 import admin_pb2, inference_pb2, sampling_pb2, types_pb2
from tests.router.answers import (
    GREEDY,
    TEXT,
    hand_over,
    hello,
    one_token_then_silence,
    rest_of,
    say_hello,
    silence,
    until_ready,
)
from tests.router.conftest import VOCAB, Site, sited
from tests.router.pairs import pairs
from tests.router.scripted import Scripted, handed_off, last, refusing, tokens
from tests.waiting import LIMIT_S, until

# --- instances ------------------------------------------------------------------------------------


async def test_an_instance_that_is_not_ready_gets_nothing(site: Site) -> None:
    hello(site)
    site.d1.control.set_ready(False)
    await asyncio.wait_for(until_ready(site.router, "d1", False), LIMIT_S)
    await site.answer()
    await site.answer()
    assert (len(site.d1.requests), len(site.d2.requests)) == (0, 2)


async def test_without_an_instance_of_a_role_the_fault_names_it(site: Site) -> None:
    site.p.control.set_ready(False)
    await asyncio.wait_for(until_ready(site.router, "p1", False), LIMIT_S)
    fault = await site.fault()
    assert (fault.code, fault.reason) == (Code.UNAVAILABLE, Reason.NO_INSTANCE)
    assert fault.metadata["role"] == "prefill"


async def test_what_is_served_is_told_with_the_least_of_everyones_limits(site: Site) -> None:
    site.d2.model.max_model_len = 500
    site.d2.control.set_ready(False)
    await asyncio.wait_for(until_ready(site.router, "d2", False), LIMIT_S)
    site.d2.control.set_ready(True)
    await asyncio.wait_for(until_ready(site.router, "d2", True), LIMIT_S)
    info = await site.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
    assert (info.model, info.max_model_len, info.vocab_size) == ("scripted", 500, VOCAB)
    assert not info.HasField("layout")


async def test_an_instance_that_was_replaced_is_met_under_its_new_epoch(site: Site) -> None:
    """S14: a call meant for the old one is refused, and the next goes to the new one."""

    hello(site)
    site.d2.control.set_ready(False)
    await asyncio.wait_for(until_ready(site.router, "d2", False), LIMIT_S)
    site.p.script = silence
    site.d1.script = refusing(Fault(Reason.STALE_EPOCH, "epoch 8 serves here"))
    site.d1.instance.epoch = 8
    fault = await site.fault()
    assert (fault.code, fault.reason) == (Code.UNAVAILABLE, Reason.STALE_EPOCH)
    await asyncio.wait_for(until_ready(site.router, "d1", True), LIMIT_S)
    hello(site)
    await site.answer()
    assert site.d1.requests[-1].handoff.ref.decode_epoch == 8


async def test_an_instance_of_another_role_is_asked_again_at_least_so_often() -> None:
    class Wrong(Scripted):
        asked = 0

        def server_info(self) -> admin_pb2.ServerInfo:
            self.asked += 1
            return super().server_info()

    wrong = Wrong(types_pb2.ROLE_DECODE, "d1")
    wrong.instance.role = types_pb2.ROLE_PREFILL
    await wrong.start()
    config = RouterConfig(
        decode=(wrong.endpoint,), aggregated=True, reconnect_min_s=0.01, watch_backoff_max_s=0.02
    )
    router = await start_router(config, SimTokenizer(VOCAB))
    try:
        await until(lambda: wrong.asked >= 20)
        assert not router.ready
    finally:
        await router.stop()
        await wrong.stop()


# --- operators ------------------------------------------------------------------------------------


async def test_an_operator_sees_the_requests_in_flight_and_may_end_one(site: Site) -> None:
    site.p.script, site.d1.script = silence, one_token_then_silence
    call = site.generate(request_id="mine")
    await call.read()
    listed = await site.admin.ListTransfers(admin_pb2.ListTransfersRequest())
    (info,) = listed.transfers
    assert (info.request_id, info.peer) == ("mine", "p1 > d1")
    assert info.state == types_pb2.TRANSFER_STATE_STREAMING
    assert (info.prompt_tokens, info.generated_tokens) == (3, 1)
    await site.admin.ReleaseTransfer(
        admin_pb2.ReleaseTransferRequest(transfer_id=info.ref.transfer_id, reason="enough")
    )
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() is grpc.StatusCode.ABORTED
    assert "enough" in (raised.value.details() or "")
    await asyncio.wait_for(asyncio.gather(site.p.left.wait(), site.d1.left.wait()), LIMIT_S)
    ended = await site.admin.GetTransfer(
        admin_pb2.GetTransferRequest(transfer_id=info.ref.transfer_id)
    )
    assert ended.transfer.state == types_pb2.TRANSFER_STATE_RELEASED


async def test_an_operator_sees_every_instance_and_which_is_unreachable(site: Site) -> None:
    await site.d2.stop()
    info = await site.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(peers=True))
    assert info.server.instance.role == types_pb2.ROLE_ROUTER
    assert info.server.health == admin_pb2.HEALTH_SERVING
    peers = {peer.instance.name: peer for peer in info.peers}
    assert peers.keys() == {"p1", "d1", "d2"}
    assert peers["d2"].health == admin_pb2.HEALTH_UNREACHABLE
    assert peers["d2"].instance.role == types_pb2.ROLE_DECODE
    assert peers["d1"].health == admin_pb2.HEALTH_SERVING


async def test_what_prefill_says_again_is_counted_and_changes_nothing(site: Site) -> None:
    async def hand_over_twice(request: Any) -> AsyncIterator[Any]:
        yield handed_off()
        yield handed_off(compute=9)
        said.set()

    async def wait_and_say_hello(request: Any) -> AsyncIterator[Any]:
        yield tokens(TEXT[0])
        await said.wait()
        yield last(*TEXT[1:])

    said = asyncio.Event()
    site.p.script, site.d1.script = hand_over_twice, wait_and_say_hello
    call = site.generate()
    await call.read()
    info = await site.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
    while not info.server.late_events:
        info = await site.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
    messages = await rest_of(call)
    assert info.server.late_events == 1
    assert seconds(messages[-1].timings.compute) == 0


async def test_a_draining_router_refuses_what_is_new_and_finishes_what_runs(site: Site) -> None:
    go_on = asyncio.Event()

    async def slow(request: Any) -> AsyncIterator[Any]:
        yield tokens(TEXT[0])
        await go_on.wait()
        yield last(*TEXT[1:])

    site.p.script, site.d1.script = hand_over, slow
    running = site.generate()
    await running.read()
    answer = await site.admin.Drain(admin_pb2.DrainRequest())
    assert answer.transfers == 1
    fault = await site.fault()
    assert (fault.code, fault.reason) == (Code.UNAVAILABLE, Reason.DRAINING)
    go_on.set()
    assert (await rest_of(running))[-1].finish_reason == types_pb2.FINISH_REASON_LENGTH
    await asyncio.wait_for(site.router.drained(), LIMIT_S)


async def test_what_runs_when_the_drains_time_is_over_fails_with_draining(site: Site) -> None:
    site.p.script, site.d1.script = silence, silence
    failing = asyncio.create_task(site.fault())
    await asyncio.wait_for(asyncio.gather(site.p.came.wait(), site.d1.came.wait()), LIMIT_S)
    answer = await site.admin.Drain(admin_pb2.DrainRequest(deadline=duration(0)))
    assert answer.transfers == 1
    fault = await asyncio.wait_for(failing, LIMIT_S)
    assert (fault.code, fault.reason) == (Code.UNAVAILABLE, Reason.DRAINING)
    await asyncio.wait_for(asyncio.gather(site.p.left.wait(), site.d1.left.wait()), LIMIT_S)
    await asyncio.wait_for(site.router.drained(), LIMIT_S)


async def test_a_stop_cuts_a_drain_short_and_says_so_to_what_runs(site: Site) -> None:
    site.p.script, site.d1.script = silence, silence
    failing = asyncio.create_task(site.fault())
    await asyncio.wait_for(asyncio.gather(site.p.came.wait(), site.d1.came.wait()), LIMIT_S)
    assert site.router.drain(60.0) == site.router.drain(90.0) == 1
    await asyncio.wait_for(site.router.stop(), LIMIT_S)
    fault = await asyncio.wait_for(failing, LIMIT_S)
    assert (fault.code, fault.reason) == (Code.UNAVAILABLE, Reason.DRAINING)


async def test_who_waits_for_an_instance_when_the_drains_time_is_over_is_told() -> None:
    async with pairs(retry_wait_s=60.0) as site:
        for instance in (site.d1, site.d2):
            await instance.stop()
            await asyncio.wait_for(until_ready(site.router, instance.instance.name, False), LIMIT_S)
        call = site.ask()
        await until(lambda: len(site.router.in_flight) == 1)
        assert site.router.drain(0) == 1
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(call.read(), LIMIT_S)
        fault = rpc.read_error(raised.value)
        assert isinstance(fault, Fault) and fault.reason is Reason.DRAINING


async def test_who_is_being_tokenized_when_the_drains_time_is_over_is_told() -> None:
    encoding, go_on = threading.Event(), threading.Event()

    class Slow(SimTokenizer):
        def encode(self, text: str) -> list[int]:
            encoding.set()
            assert go_on.wait(60)
            return super().encode(text)

    async with sited(Slow(VOCAB)) as site:
        hello(site)
        failing = asyncio.create_task(site.fault(text="a" * 100_000))
        assert await asyncio.to_thread(encoding.wait, 60)
        try:
            assert site.router.drain(0) == 1
            fault = await asyncio.wait_for(failing, LIMIT_S)
        finally:
            go_on.set()
        assert (fault.code, fault.reason) == (Code.UNAVAILABLE, Reason.DRAINING)
        assert not site.p.requests and not site.d1.requests


# --- tracing --------------------------------------------------------------------------------------


async def test_one_trace_goes_from_the_client_into_both_legs(site: Site) -> None:
    hello(site)
    trace = "0af7651916cd43dd8448eb211c80319c"
    request = inference_pb2.GenerateRequest(text="hi", sampling=GREEDY)
    parent = (("traceparent", f"00-{trace}-b7ad6b7169203331-01"),)
    await site.stub.Generate(request, metadata=parent).read()
    call = site.stub.Generate(request, metadata=parent)
    assert [m async for m in call]
    for instance in (site.p, site.d1):
        assert instance.metadata[0]["traceparent"].split("-")[1] == trace
    await site.router.in_flight.idle()
    spans = {span.name: span for span in site.spans.get_finished_spans()}
    request_span, route = spans["pd.request"], spans["pd.route"]
    assert f"{request_span.context.trace_id:032x}" == trace
    assert route.parent is not None and route.parent.span_id == request_span.context.span_id
    assert request_span.attributes is not None and route.attributes is not None
    assert request_span.attributes["pd.outcome"] == "ok"
    assert request_span.attributes["pd.transfer_id"] == route.attributes["pd.transfer_id"]


async def test_the_span_of_a_failed_request_says_why_and_holds_no_prompt(site: Site) -> None:
    await site.fault(text="a secret", sampling=sampling_pb2.SamplingParams(top_k=-1))
    (span,) = [s for s in site.spans.get_finished_spans() if s.name == "pd.request"]
    assert span.attributes is not None
    assert span.attributes["pd.outcome"] == "BAD_REQUEST"
    assert "secret" not in span.to_json()


# --- memory ---------------------------------------------------------------------------------------


async def test_nothing_of_a_request_that_was_answered_waits_to_be_collected(site: Site) -> None:
    """Otherwise each leaves its prompt and its two calls to the cyclic collector, which comes after
    hundreds of them."""
    hello(site)
    gc.collect()
    gc.disable()
    try:
        await site.answer()
        await asyncio.wait_for(site.router.in_flight.idle(), LIMIT_S)
        await until(lambda: not _left_of_requests())
    finally:
        gc.enable()


def _left_of_requests() -> list[object]:
    kinds = (RoutedCall, AttemptLegs, RecoveringRequest, RoutableRequest)
    # By type alone: isinstance asks each object for its class, and some of torch's warn when asked.
    return [each for each in gc.get_objects() if type(each) in kinds]


async def test_every_answer_and_every_refusal_names_its_trace(site: Site) -> None:
    traceparent = (("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01"),)
    site.p.script, site.d1.script, site.d2.script = hand_over, say_hello, say_hello
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]),
        sampling=sampling_pb2.SamplingParams(max_tokens=4, temperature=0),
    )
    for metadata, trace in ((traceparent, "ab" * 16), ((), "")):
        call = site.stub.Generate(request, metadata=metadata)
        async for _ in call:
            pass
        told = dict(await call.trailing_metadata() or ())["traceresponse"]
        assert isinstance(told, str) and trace in told.split("-")[1]
    site.p.control.set_ready(False)
    await asyncio.wait_for(until_ready(site.router, "p1", False), LIMIT_S)
    call = site.stub.Generate(request, metadata=traceparent)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    fault = rpc.read_error(raised.value)
    assert isinstance(fault, Fault) and fault.metadata["trace_id"] == "ab" * 16
