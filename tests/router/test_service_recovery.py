"""What the client and the instances see of a request that is tried elsewhere, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.router.server import RouterServer, start_router
from pd_grpc.telemetry import names
from pd_grpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2,
    sampling_pb2,
    types_pb2,
)
from tests.router.answers import (
    GREEDY,
    TEXT,
    hand_over,
    rest_of,
    say_hello,
    silence,
    until_ready,
)
from tests.router.conftest import VOCAB, until_all_ready
from tests.router.scripted import Script, Scripted, last, never, refusing, tokens
from tests.waiting import until

STUCK = Fault(Reason.ENGINE_STUCK, "the engine has stopped")


@dataclass
class Pairs:
    """Two Ps and two Ds behind a router. The first of each is asked first, and fails."""

    router: RouterServer
    p1: Scripted
    p2: Scripted
    d1: Scripted
    d2: Scripted
    stub: inference_pb2_grpc.InferenceServiceStub
    admin: admin_pb2_grpc.AdminServiceStub
    spans: InMemorySpanExporter
    metrics: InMemoryMetricReader

    def ask(self, **fields: Any) -> Any:
        fields.setdefault("sampling", sampling_pb2.SamplingParams(max_tokens=9, temperature=0))
        prompt = inference_pb2.TokenIds(ids=[5, 6, 7])
        return self.stub.Generate(inference_pb2.GenerateRequest(token_ids=prompt, **fields))

    async def answer(self, **fields: Any) -> list[inference_pb2.GenerateResponse]:
        return await asyncio.wait_for(rest_of(self.ask(**fields)), 10)

    def counted(self, metric: str) -> dict[str, float]:
        """A counter's values by reason."""
        data = self.metrics.get_metrics_data()
        found = [] if data is None else data.resource_metrics
        metrics = [m for r in found for scope in r.scope_metrics for m in scope.metrics]
        points = [p for m in metrics if m.name == metric for p in m.data.data_points]
        values = {}
        for point in points:
            assert isinstance(point, NumberDataPoint) and point.attributes is not None
            values[str(point.attributes.get("reason", ""))] = float(point.value)
        return values


@contextlib.asynccontextmanager
async def pairs(**settings: Any) -> AsyncIterator[Pairs]:
    prefill, decode = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE
    p1, p2 = Scripted(prefill, "p1"), Scripted(prefill, "p2")
    d1, d2 = Scripted(decode, "d1"), Scripted(decode, "d2")
    instances = [p1, p2, d1, d2]
    for instance in instances:
        await instance.start()
    config = RouterConfig(
        prefill=(p1.endpoint, p2.endpoint),
        decode=(d1.endpoint, d2.endpoint),
        grace_s=0.3,
        settle_s=0.2,
        **settings,
    )
    provider, spans, metrics = TracerProvider(), InMemorySpanExporter(), InMemoryMetricReader()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    router = await start_router(
        config,
        SimTokenizer(VOCAB),
        tracer_provider=provider,
        meter_provider=MeterProvider([metrics]),
    )
    await asyncio.wait_for(until_all_ready(router), 10)
    try:
        async with grpc.aio.insecure_channel(router.endpoint) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            yield Pairs(router, p1, p2, d1, d2, stub, admin, spans, metrics)
        await asyncio.wait_for(router.in_flight.idle(), 5)
        assert not router.in_flight.running(), "a request is still in flight"
        loads = [router.routing.prefill_load, router.routing.decode_load]
        held = {load.in_flight(i.endpoint) for load in loads for i in instances}
        assert held == {(0, 0)}, "something is still charged"
    finally:
        await router.stop()
        for instance in instances:
            await instance.stop()


def saying(count: int, then: Fault | None = None) -> Script:
    """The first `count` tokens of the text, then a failure, or silence."""

    async def script(request: Any) -> AsyncIterator[Any]:
        if count:
            yield tokens(*TEXT[:count])
        if then is not None:
            raise then
        await never()

    return script


async def go_on(request: inference_pb2.GenerateRequest) -> AsyncIterator[Any]:
    """As a D does: what the client has is not said again, and counts."""
    known = len(request.generated_token_ids)
    for token in TEXT[known:]:
        yield tokens(token)
    message = last(reason=types_pb2.FINISH_REASON_STOP)
    message.usage.completion_tokens = len(TEXT)
    yield message


def go_on_elsewhere(site: Pairs, failing: Script) -> None:
    site.p1.script = site.p2.script = hand_over
    site.d1.script, site.d2.script = failing, go_on


def text_of(messages: list[inference_pb2.GenerateResponse]) -> str:
    return "".join(message.text for message in messages)


def tokens_of(messages: list[inference_pb2.GenerateResponse]) -> list[int]:
    return [token for message in messages for token in message.token_ids]


@pytest.mark.parametrize("count", range(1, len(TEXT)))
async def test_the_text_is_whole_wherever_the_seam_is(count: int) -> None:
    """TEXT is a byte a token, and its second character has two."""
    async with pairs() as site:
        go_on_elsewhere(site, saying(count, STUCK))
        messages = await site.answer()
    assert text_of(messages) == "héllo"
    assert tokens_of(messages) == TEXT
    assert [bool(m.finish_reason) for m in messages].count(True) == 1
    assert messages[-1].usage == types_pb2.Usage(prompt_tokens=3, completion_tokens=len(TEXT))
    (again,) = site.d2.requests
    assert list(again.generated_token_ids) == TEXT[:count]


async def test_both_legs_of_the_new_attempt_carry_the_same_request() -> None:
    sampling = sampling_pb2.SamplingParams(max_tokens=9, temperature=1)
    async with pairs() as site:
        go_on_elsewhere(site, saying(2, STUCK))
        messages = await site.answer(sampling=sampling, generated_token_ids=TEXT[:1])
    first, again = site.d1.requests[0], site.d2.requests[0]
    prefill: prefill_pb2.PrefillRequest = (*site.p1.requests, *site.p2.requests)[-1]
    assert again.handoff.ref.transfer_id == first.handoff.ref.transfer_id
    assert (first.handoff.ref.attempt, again.handoff.ref.attempt, prefill.ref.attempt) == (1, 2, 2)
    assert again.sampling == first.sampling == prefill.sampling
    assert again.sampling.HasField("seed")
    assert again.token_ids == first.token_ids and again.request_id == first.request_id
    known = [TEXT[0], *TEXT[:2]]
    assert list(again.generated_token_ids) == list(prefill.generated_token_ids) == known
    assert [target.name for target in prefill.decodes] == ["d2"], "d1 is no alternate"
    assert messages[-1].decode_instance == "from-d"


async def test_a_stop_string_across_the_seam_ends_the_text_before_it() -> None:
    sampling = sampling_pb2.SamplingParams(max_tokens=9, temperature=0, stop=["llo"])
    async with pairs() as site:
        go_on_elsewhere(site, saying(4, STUCK))
        messages = await site.answer(sampling=sampling)
    assert text_of(messages) == "hé"
    assert tokens_of(messages) == TEXT


async def test_each_token_has_its_logprobs_once() -> None:
    def with_logprobs(script: Script) -> Script:
        async def played(request: Any) -> AsyncIterator[Any]:
            async for message in script(request):
                for token in message.token_ids:
                    message.logprobs.add().chosen.token_id = token
                yield message

        return played

    sampling = sampling_pb2.SamplingParams(max_tokens=9, temperature=0, logprobs=1)
    async with pairs() as site:
        go_on_elsewhere(site, with_logprobs(saying(3, STUCK)))
        site.d2.script = with_logprobs(go_on)
        messages = await site.answer(sampling=sampling)
    assert [p.chosen.token_id for m in messages for p in m.logprobs] == TEXT


@pytest.mark.parametrize(
    ("said", "sampling", "reason"),
    [
        (4, GREEDY, types_pb2.FINISH_REASON_LENGTH),
        (
            5,
            sampling_pb2.SamplingParams(max_tokens=9, temperature=0, stop=["l"]),
            types_pb2.FINISH_REASON_STOP,
        ),
    ],
)
async def test_an_answer_of_which_only_the_end_was_lost_is_whole(
    said: int, sampling: sampling_pb2.SamplingParams, reason: types_pb2.FinishReason
) -> None:
    async with pairs() as site:
        go_on_elsewhere(site, saying(said, STUCK))
        messages = await site.answer(sampling=sampling)
        assert not site.d2.requests, "there was nothing left to ask for"
    assert tokens_of(messages) == TEXT[:said]
    assert messages[-1].finish_reason == reason
    assert messages[-1].usage == types_pb2.Usage(prompt_tokens=3, completion_tokens=said)
    assert (messages[-1].prefill_instance, messages[-1].decode_instance) == ("p1", "d1")


async def test_a_decode_whose_connection_is_gone_is_left_in_mid_answer() -> None:
    async with pairs() as site:
        go_on_elsewhere(site, saying(2))
        call = site.ask()
        first = await call.read()
        await site.d1.stop()
        messages = [first, *await asyncio.wait_for(rest_of(call), 5)]
    assert text_of(messages) == "héllo"


async def test_a_prefill_that_fails_is_left_and_its_decode_leg_cancelled() -> None:
    async with pairs() as site:
        site.p1.script = refusing(Fault(Reason.SENDER_STUCK, "stuck"))
        site.p2.script = hand_over
        site.d1.script, site.d2.script = silence, say_hello
        messages = await site.answer()
        await asyncio.wait_for(site.d1.left.wait(), 5)
        (again,) = site.d2.requests
        assert (again.handoff.ref.attempt, again.handoff.prefill_name) == (2, "p2")
    assert tokens_of(messages) == TEXT
    assert messages[-1].prefill_instance == "p2"


async def test_a_client_that_leaves_during_the_second_attempt_ends_it() -> None:
    async with pairs() as site:
        go_on_elsewhere(site, saying(2, STUCK))
        site.d2.script = silence
        call = site.ask()
        await call.read()
        await asyncio.wait_for(site.d2.came.wait(), 5)
        call.cancel()
        await asyncio.wait_for(site.d2.left.wait(), 5)


async def test_an_operator_sees_the_current_attempt() -> None:
    async with pairs() as site:
        go_on_elsewhere(site, saying(2, STUCK))
        site.d2.script = silence
        call = site.ask()
        await call.read()
        await asyncio.wait_for(site.d2.came.wait(), 5)
        transfer_id = site.d2.requests[0].handoff.ref.transfer_id
        request = admin_pb2.GetTransferRequest(transfer_id=transfer_id)
        shown = (await site.admin.GetTransfer(request)).transfer
        assert (shown.ref.attempt, shown.generated_tokens) == (2, 2)
        assert shown.peer.endswith("> d2")
        assert shown.state == types_pb2.TRANSFER_STATE_STREAMING
        call.cancel()


async def test_counts_and_the_trace_tell_of_each_try() -> None:
    async with pairs(retry_burst=2, retry_share=0.0) as site:
        go_on_elsewhere(site, saying(2, STUCK))
        await site.answer()
        site.d1.script = saying(0, STUCK)
        site.p1.script = site.p2.script = silence
        site.d2.script = saying(0, STUCK)
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError):
                await site.answer()
        assert site.counted(names.METRIC_ROUTER_CONTINUATIONS) == {"ENGINE_STUCK": 1}
        assert site.counted(names.METRIC_ROUTER_RETRIES) == {"ENGINE_STUCK": 2}
        assert site.counted(names.METRIC_ROUTER_RETRIES_REFUSED) == {}
        assert site.counted(names.METRIC_ROUTER_RETRY_BUDGET) == {"": 0}
        with pytest.raises(grpc.aio.AioRpcError):
            await site.answer()
        assert site.counted(names.METRIC_ROUTER_RETRIES_REFUSED) == {"ENGINE_STUCK": 1}
        info = await site.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
        assert info.server.recovery == admin_pb2.Recovery(retries=2, continuations=1, refused=1)
    (span,) = (
        s
        for s in site.spans.get_finished_spans()
        if s.name == names.SPAN_REQUEST and s.attributes and s.attributes["pd.outcome"] == "ok"
    )
    assert span.attributes is not None and span.attributes[names.ATTR_ATTEMPT] == 2
    (event,) = span.events
    assert event.name == names.EVENT_RECOVERY and dict(event.attributes or {}) == {
        names.ATTR_ATTEMPT: 2,
        names.ATTR_RECOVERY: "continuation",
        names.ATTR_ERROR_TYPE: "ENGINE_STUCK",
    }


async def test_a_router_that_may_not_fails_at_once() -> None:
    async with pairs(retry=False, continuation=False) as site:
        for said in (0, 2):
            go_on_elsewhere(site, saying(said, STUCK))
            site.d2.script = site.d1.script
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await site.answer()
            fault = rpc.read_error(raised.value)
            assert isinstance(fault, Fault) and fault.reason is Reason.ENGINE_STUCK
        assert len([*site.d1.requests, *site.d2.requests]) == 2, "one try each"


@pytest.mark.parametrize("who", ["another", "the same, restarted"])
async def test_an_answer_waits_a_moment_for_a_decode_that_comes_back(who: str) -> None:
    async with pairs(retry_wait_s=5.0, reconnect_max_s=0.1) as site:
        await site.d2.stop()
        await asyncio.wait_for(until_ready(site.router, "d2", False), 5)
        go_on_elsewhere(site, saying(2))
        call = site.ask()
        first = await call.read()
        came_back = site.d2 if who == "another" else site.d1
        port = int(came_back.endpoint.rpartition(":")[2])
        await site.d1.stop()
        again = Scripted(types_pb2.ROLE_DECODE, came_back.control.name, port)
        again.instance.epoch, again.script = 8, go_on
        await again.start()
        try:
            messages = [first, *await asyncio.wait_for(rest_of(call), 10)]
        finally:
            await again.stop()
        assert text_of(messages) == "héllo"
        (request,) = again.requests
        assert (request.handoff.ref.attempt, request.handoff.ref.decode_epoch) == (2, 8)


async def test_a_request_that_waits_ends_with_what_happened_when_nobody_comes() -> None:
    async with pairs(retry_wait_s=0.2) as site:
        await site.d2.stop()
        await asyncio.wait_for(until_ready(site.router, "d2", False), 5)
        go_on_elsewhere(site, saying(2, STUCK))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await site.answer()
        fault = rpc.read_error(raised.value)
        assert isinstance(fault, Fault) and fault.reason is Reason.ENGINE_STUCK


async def test_a_new_request_waits_a_moment_for_a_role_that_is_out_of_reach() -> None:
    async with pairs(retry_wait_s=5.0, reconnect_max_s=0.1) as site:
        for instance in (site.d1, site.d2):
            await instance.stop()
        for name in ("d1", "d2"):
            await asyncio.wait_for(until_ready(site.router, name, False), 5)
        go_on_elsewhere(site, silence)
        asking = asyncio.create_task(site.answer())
        await until(lambda: len(site.router.in_flight) == 1)
        again = Scripted(types_pb2.ROLE_DECODE, "d2", int(site.d2.endpoint.rpartition(":")[2]))
        again.script = go_on
        await again.start()
        try:
            messages = await asking
        finally:
            await again.stop()
        assert text_of(messages) == "héllo"


async def test_a_new_request_does_not_wait_for_those_who_say_that_they_take_none() -> None:
    async with pairs(retry_wait_s=60.0) as site:
        for instance in (site.d1, site.d2):
            instance.control.set_ready(False, "the test wants it so")
            await asyncio.wait_for(until_ready(site.router, instance.instance.name, False), 5)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await site.answer()
        fault = rpc.read_error(raised.value)
        assert isinstance(fault, Fault) and fault.reason is Reason.NO_INSTANCE
