"""The router over real sockets, between a client and instances whose answers the test writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.context import Context

from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.messages import seconds
from pd_grpc.v1 import admin_pb2, inference_pb2, sampling_pb2, types_pb2
from tests.router.conftest import VOCAB, Site
from tests.router.scripted import handed_off, last, never, placing, refusing, tokens

GREEDY = sampling_pb2.SamplingParams(max_tokens=4, temperature=0)
TEXT = SimTokenizer(VOCAB).encode("héllo")


async def hand_over(request: Any) -> AsyncIterator[Any]:
    yield handed_off(queue=1, prepare=2, allocate=1, compute=3, exposed_send=4)


async def say_hello(request: Any) -> AsyncIterator[Any]:
    yield tokens(*TEXT[:2])
    yield tokens(*TEXT[2:5])
    yield last(*TEXT[5:])


async def silence(request: Any) -> AsyncIterator[Any]:
    await never()
    yield


async def one_token_then_silence(request: Any) -> AsyncIterator[Any]:
    yield tokens(TEXT[0])
    await never()


async def rest_of(call: Any) -> list[inference_pb2.GenerateResponse]:
    """What follows of an answer that has been read by `read()`."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
        messages.append(message)
    return messages


def hello(site: Site) -> None:
    """P hands over; every D says hello."""
    site.p.script, site.d1.script, site.d2.script = hand_over, say_hello, say_hello


async def test_an_answer_has_every_token_its_text_and_at_the_end_all_there_is_to_know(
    site: Site,
) -> None:
    hello(site)
    messages = await site.answer(request_id="mine")
    assert [i for m in messages for i in m.token_ids] == TEXT
    assert "".join(m.text for m in messages) == "héllo"
    end = messages[-1]
    assert messages[0].request_id == "mine"
    assert end.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (3, 9)
    assert (end.prefill_instance, end.decode_instance) == ("p1", "from-d")
    assert all(m.finish_reason == 0 and not m.HasField("usage") for m in messages[:-1])


async def test_both_legs_carry_the_same_request(site: Site) -> None:
    hello(site)
    sampling = sampling_pb2.SamplingParams(max_tokens=9, temperature=0.5, stop=["x"])
    await site.answer(text="hi", sampling=sampling, generated_token_ids=[9], request_id="mine")
    (prefill,), (decode,) = site.p.requests, site.d1.requests
    assert prefill.sampling == decode.sampling
    assert prefill.sampling.HasField("seed"), "a sampled answer without a seed gets one"
    assert list(prefill.token_ids) == list(decode.token_ids.ids)
    assert list(prefill.generated_token_ids) == list(decode.generated_token_ids) == [9]
    assert prefill.ref.transfer_id == decode.handoff.ref.transfer_id
    assert prefill.ref.attempt == decode.handoff.ref.attempt == 1
    assert decode.handoff.ref.decode_epoch == site.d1.instance.epoch
    assert (decode.handoff.decode_name, decode.handoff.prefill_name) == ("d1", "p1")
    assert [d.name for d in prefill.decodes] == ["d1", "d2"]
    assert prefill.request_id == decode.request_id == "mine"


async def test_a_greedy_answer_gets_no_seed(site: Site) -> None:
    hello(site)
    await site.answer()
    assert not site.p.requests[0].sampling.HasField("seed")


async def test_a_client_that_names_no_max_tokens_gets_256_or_what_fits(site: Site) -> None:
    hello(site)
    greedy = sampling_pb2.SamplingParams(temperature=0)
    await site.answer(sampling=greedy)
    ids = inference_pb2.TokenIds(ids=[5] * 900)
    await site.answer(sampling=greedy, token_ids=ids)
    assert [r.sampling.max_tokens for r in site.p.requests] == [256, 100]


async def test_messages_go_through_the_chat_template(site: Site) -> None:
    hello(site)
    chat = inference_pb2.ChatMessages(
        messages=[inference_pb2.ChatMessage(role="user", content="hi")]
    )
    await site.answer(messages=chat)
    expected = SimTokenizer(VOCAB).encode_chat([("user", "hi")])
    assert list(site.p.requests[0].token_ids) == expected


async def test_text_ends_before_a_stop_string(site: Site) -> None:
    hello(site)
    sampling = sampling_pb2.SamplingParams(max_tokens=9, temperature=0, stop=["llo"])
    messages = await site.answer(sampling=sampling)
    assert "".join(m.text for m in messages) == "hé"


async def test_requests_take_turns_between_the_decode_instances(site: Site) -> None:
    hello(site)
    for _ in range(4):
        await site.answer()
    assert len(site.d1.requests) == len(site.d2.requests) == 2


async def test_the_stages_add_up_to_the_time_to_first_token(site: Site) -> None:
    async def work(request: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(0.02)
        yield handed_off(queue=1, prepare=2, allocate=1, compute=3, exposed_send=4)

    async def begin_late(request: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(0.02)
        yield tokens(*TEXT[:1])
        yield last(*TEXT[1:])

    site.p.script, site.d1.script = work, begin_late
    loop = asyncio.get_running_loop()
    begun = loop.time()
    call = site.generate()
    await call.read()
    to_first_token = loop.time() - begun
    times = (await rest_of(call))[-1].timings
    stages = (times.route, times.queue, times.prepare, times.compute, times.first_token)
    assert 0.02 <= sum(map(seconds, stages)) <= to_first_token
    assert seconds(times.exposed_send) == 0.004
    assert seconds(times.total) >= sum(map(seconds, stages))


async def test_a_slow_reader_gets_fewer_and_larger_messages(site: Site) -> None:
    sent = asyncio.Event()
    count = 10_000

    async def flood(request: Any) -> AsyncIterator[Any]:
        for _ in range(count // 10):
            yield tokens(*[TEXT[0]] * 10)
        yield last()
        sent.set()

    messages = []

    async def write_slowly(message: inference_pb2.GenerateResponse) -> None:
        messages.append(message)
        await asyncio.wait_for(sent.wait(), 20)

    site.p.script, site.d1.script = hand_over, flood
    request = inference_pb2.GenerateRequest(text="hi", sampling=GREEDY)
    await site.router.service.route(request, 60, Context(), write_slowly)
    assert sum(len(m.token_ids) for m in messages) == count
    assert "".join(m.text for m in messages) == "h" * count
    assert 3 <= len(messages) < 50, "what has piled up goes in one message, of bounded size"


# --- failures -------------------------------------------------------------------------------------


async def test_prefills_refusal_reaches_the_client_and_ends_the_decode_leg(site: Site) -> None:
    site.p.script = refusing(Fault(Reason.NO_BLOCKS, "full", retry_after_s=1.5))
    site.d1.script = silence
    fault = await site.fault()
    assert (fault.code, fault.reason) == (Code.RESOURCE_EXHAUSTED, Reason.NO_BLOCKS)
    assert fault.retry_after_s == 1.5
    await asyncio.wait_for(site.d1.left.wait(), 5)


async def test_a_fault_between_the_instances_has_the_code_meant_for_clients(site: Site) -> None:
    site.p.script = refusing(Fault(Reason.LAYOUT_MISMATCH, "unlike", {"field": "block_size"}))
    site.d1.script = silence
    fault = await site.fault()
    assert (fault.code, fault.reason) == (Code.UNAVAILABLE, Reason.LAYOUT_MISMATCH)
    assert fault.metadata["field"] == "block_size"


async def test_tokens_that_came_before_the_failure_are_given_out_before_it(site: Site) -> None:
    async def break_down(request: Any) -> AsyncIterator[Any]:
        yield tokens(*TEXT[:3])
        raise Fault(Reason.ENGINE_ERROR, "boom")

    site.p.script, site.d1.script = hand_over, break_down
    got: list[int] = []
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for message in site.generate():
            got += message.token_ids
    assert got == TEXT[:3]
    assert raised.value.code() is grpc.StatusCode.INTERNAL


async def test_decode_lost_in_mid_answer_is_told_at_once(site: Site) -> None:
    site.p.script, site.d1.script = hand_over, one_token_then_silence
    call = site.generate()
    await call.read()
    await site.d1.stop()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await asyncio.wait_for(call.read(), 2)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "DECODE_LOST" in str(raised.value.trailing_metadata())


async def test_prefill_lost_and_decode_silent_is_told_within_two_seconds(site: Site) -> None:
    site.p.script, site.d1.script = silence, silence
    failing = asyncio.create_task(site.fault())
    await asyncio.wait_for(site.p.came.wait(), 5)
    await site.p.stop()
    fault = await asyncio.wait_for(failing, 2)
    assert (fault.code, fault.reason) == (Code.UNAVAILABLE, Reason.PREFILL_LOST)
    await asyncio.wait_for(site.d1.left.wait(), 5)


async def test_prefill_lost_after_the_hand_off_harms_no_answer(site: Site) -> None:
    """The hand-off was not reported: D is asked, and says that it generates."""
    go_on = asyncio.Event()

    async def slow(request: Any) -> AsyncIterator[Any]:
        yield tokens(TEXT[0])
        await go_on.wait()
        yield last(*TEXT[1:])

    site.p.script, site.d1.script = silence, slow
    site.d1.states["*"] = types_pb2.TRANSFER_STATE_DECODING
    call = site.generate()
    await call.read()
    await site.p.stop()
    waiting = asyncio.create_task(call.read())
    done, _ = await asyncio.wait([waiting], timeout=1)  # well beyond grace and settle
    assert not done
    go_on.set()
    message = await asyncio.wait_for(waiting, 5)
    assert message.finish_reason == types_pb2.FINISH_REASON_LENGTH


async def test_placing_moves_the_decode_leg(site: Site) -> None:
    async def place(request: Any) -> AsyncIterator[Any]:
        yield placing(site.d2)
        await asyncio.wait_for(site.d1.left.wait(), 5)
        yield handed_off()

    site.p.script, site.d1.script, site.d2.script = place, silence, say_hello
    messages = await site.answer()
    assert [i for m in messages for i in m.token_ids] == TEXT
    (moved,) = site.d2.requests
    assert moved.handoff.decode_name == "d2"
    assert moved.handoff.ref == site.d1.requests[0].handoff.ref


async def test_a_client_that_cancels_ends_both_legs_at_once(site: Site) -> None:
    site.p.script, site.d1.script = silence, one_token_then_silence
    call = site.generate()
    await call.read()
    call.cancel()
    await asyncio.wait_for(asyncio.gather(site.p.left.wait(), site.d1.left.wait()), 2)


async def test_a_client_that_vanishes_ends_both_legs_at_once(site: Site) -> None:
    site.p.script, site.d1.script = silence, one_token_then_silence
    async with grpc.aio.insecure_channel(site.router.endpoint) as channel:
        call = type(site.stub)(channel).Generate(
            inference_pb2.GenerateRequest(
                text="hi", sampling=sampling_pb2.SamplingParams(max_tokens=4)
            )
        )
        await call.read()
    await asyncio.wait_for(asyncio.gather(site.p.left.wait(), site.d1.left.wait()), 2)


async def test_the_answer_to_a_deadline_comes_before_it_with_the_stage(site: Site) -> None:
    async def queue(request: Any) -> AsyncIterator[Any]:
        message = handed_off()
        message.queued.ahead = 3
        yield message
        await never()

    site.p.script, site.d1.script = queue, silence
    fault = await site.fault(timeout=0.6)
    assert fault.reason is Reason.STAGE_DEADLINE
    assert fault.metadata["stage"] == "queue"
    await asyncio.wait_for(asyncio.gather(site.p.left.wait(), site.d1.left.wait()), 2)


async def test_the_legs_have_what_is_left_of_the_clients_deadline(site: Site) -> None:
    hello(site)
    await site.answer(timeout=30)
    await site.answer()
    # gRPC rounds a deadline of 10 to 100 s up to tenths of a second on the wire.
    assert 29 < site.p.time_left[0] <= 30
    assert 29 < site.d1.time_left[0] <= 30
    assert 299 < site.p.time_left[1] <= 300, "without a deadline the budget is the default"


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": ""}, "text"),
        ({"messages": inference_pb2.ChatMessages()}, "messages"),
        (
            {
                "messages": inference_pb2.ChatMessages(
                    messages=[inference_pb2.ChatMessage(role="user")]
                )
            },
            "messages",
        ),
        ({"token_ids": inference_pb2.TokenIds()}, "token_ids"),
        ({"token_ids": inference_pb2.TokenIds(ids=[1, VOCAB])}, "token_ids.ids[1]"),
        ({"token_ids": inference_pb2.TokenIds(ids=[1] * 1000)}, "token_ids"),
        ({"text": "x" * 5000}, "text"),
        ({"generated_token_ids": [VOCAB + 1]}, "generated_token_ids[0]"),
        ({"generated_token_ids": [1, 2, 3, 4]}, "generated_token_ids"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"handoff": inference_pb2.Handoff()}, "handoff"),
        (
            {
                "messages": inference_pb2.ChatMessages(
                    messages=[inference_pb2.ChatMessage(role="imp", content="hi")]
                )
            },
            "messages",
        ),
        (
            {"sampling": sampling_pb2.SamplingParams(temperature=float("nan"))},
            "sampling.temperature",
        ),
        ({"sampling": sampling_pb2.SamplingParams(temperature=-1)}, "sampling.temperature"),
        ({"sampling": sampling_pb2.SamplingParams(top_p=0)}, "sampling.top_p"),
        ({"sampling": sampling_pb2.SamplingParams(top_k=-1)}, "sampling.top_k"),
        ({"sampling": sampling_pb2.SamplingParams(max_tokens=-3)}, "sampling.max_tokens"),
        (
            {"sampling": sampling_pb2.SamplingParams(max_tokens=3, min_tokens=4)},
            "sampling.min_tokens",
        ),
        ({"sampling": sampling_pb2.SamplingParams(min_tokens=300)}, "sampling.min_tokens"),
        ({"sampling": sampling_pb2.SamplingParams(logprobs=21)}, "sampling.logprobs"),
        (
            {"sampling": sampling_pb2.SamplingParams(stop_token_ids=[VOCAB])},
            "sampling.stop_token_ids[0]",
        ),
        ({"sampling": sampling_pb2.SamplingParams(stop=[""])}, "sampling.stop"),
    ],
)
async def test_bad_input_is_refused_by_the_name_of_its_field_before_any_leg_opens(
    fields: dict[str, Any], field: str, site: Site
) -> None:
    fault = await site.fault(**fields)
    assert (fault.code, fault.reason) == (Code.INVALID_ARGUMENT, Reason.BAD_REQUEST)
    assert fault.fields[0].field == field
    assert field in fault.message
    assert not site.p.requests and not site.d1.requests and not site.d2.requests


async def test_a_request_without_a_prompt_is_refused(site: Site) -> None:
    call = site.stub.Generate(inference_pb2.GenerateRequest(sampling=GREEDY))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "one of text, messages and token_ids" in (raised.value.details() or "")


async def test_prompt_and_output_beyond_the_model_name_what_is_needed_and_what_there_is(
    site: Site,
) -> None:
    sampling = sampling_pb2.SamplingParams(max_tokens=998, temperature=0)
    fault = await site.fault(sampling=sampling)
    assert (fault.code, fault.reason) == (Code.INVALID_ARGUMENT, Reason.TOO_LARGE)
    assert (fault.metadata["needed"], fault.metadata["total"]) == ("1001", "1000")


@pytest.mark.parametrize(
    ("fields", "feature"),
    [
        ({"scope": sampling_pb2.RequestScope(adapter="lora")}, "scope.adapter"),
        ({"sampling": sampling_pb2.SamplingParams(min_p=0.1)}, "sampling.min_p"),
        ({"sampling": sampling_pb2.SamplingParams(n=2)}, "sampling.n"),
    ],
)
async def test_a_field_reserved_but_not_built_is_refused(
    fields: dict[str, Any], feature: str, site: Site
) -> None:
    fault = await site.fault(**fields)
    assert (fault.code, fault.reason) == (Code.UNIMPLEMENTED, Reason.FEATURE)
    assert fault.metadata["feature"] == feature


async def test_log_probabilities_are_refused_where_an_instance_has_none(site: Site) -> None:
    del site.d2.model.features[:]
    site.d2.control.set_ready(False)
    await asyncio.wait_for(_until(site, "d2", False), 5)
    site.d2.control.set_ready(True)
    await asyncio.wait_for(_until(site, "d2", True), 5)
    fault = await site.fault(sampling=sampling_pb2.SamplingParams(logprobs=1))
    assert (fault.reason, fault.metadata["feature"]) == (Reason.FEATURE, "sampling.logprobs")


async def test_a_second_request_of_one_name_is_refused_and_the_first_unharmed(site: Site) -> None:
    go_on = asyncio.Event()

    async def slow(request: Any) -> AsyncIterator[Any]:
        yield tokens(TEXT[0])
        await go_on.wait()
        yield last(*TEXT[1:])

    site.p.script, site.d1.script = hand_over, slow
    first = site.generate(request_id="twin")
    await first.read()
    fault = await site.fault(request_id="twin")
    assert (fault.code, fault.reason) == (Code.ALREADY_EXISTS, Reason.DUPLICATE_REQUEST)
    assert len(site.p.requests) == 1, "the second one was scheduled"
    go_on.set()
    assert (await rest_of(first))[-1].finish_reason == types_pb2.FINISH_REASON_LENGTH
    hello(site)
    assert await site.answer(request_id="twin"), "the name is free again"


# --- instances ------------------------------------------------------------------------------------


async def _until(site: Site, name: str, ready: bool) -> None:
    discovery = site.router.discovery
    while next(v for v in discovery.instances if v.name == name).ready is not ready:
        await discovery.changed()


async def test_an_instance_that_is_not_ready_gets_nothing(site: Site) -> None:
    hello(site)
    site.d1.control.set_ready(False)
    await asyncio.wait_for(_until(site, "d1", False), 5)
    await site.answer()
    await site.answer()
    assert (len(site.d1.requests), len(site.d2.requests)) == (0, 2)


async def test_without_an_instance_of_a_role_the_fault_names_it(site: Site) -> None:
    site.p.control.set_ready(False)
    await asyncio.wait_for(_until(site, "p1", False), 5)
    fault = await site.fault()
    assert (fault.code, fault.reason) == (Code.UNAVAILABLE, Reason.NO_INSTANCE)
    assert fault.metadata == {"role": "prefill"}


async def test_what_is_served_is_told_with_the_least_of_everyones_limits(site: Site) -> None:
    site.d2.model.max_model_len = 500
    site.d2.control.set_ready(False)
    await asyncio.wait_for(_until(site, "d2", False), 5)
    site.d2.control.set_ready(True)
    await asyncio.wait_for(_until(site, "d2", True), 5)
    info = await site.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
    assert (info.model, info.max_model_len, info.vocab_size) == ("scripted", 500, VOCAB)
    assert not info.HasField("layout")


async def test_an_instance_that_was_replaced_is_met_under_its_new_epoch(site: Site) -> None:
    """S14: a call meant for the old one is refused, and the next goes to the new one."""

    hello(site)
    site.d2.control.set_ready(False)
    await asyncio.wait_for(_until(site, "d2", False), 5)
    site.p.script = silence
    site.d1.script = refusing(Fault(Reason.STALE_EPOCH, "epoch 8 serves here"))
    site.d1.instance.epoch = 8
    fault = await site.fault()
    assert (fault.code, fault.reason) == (Code.UNAVAILABLE, Reason.STALE_EPOCH)
    await asyncio.wait_for(_until(site, "d1", True), 5)
    hello(site)
    await site.answer()
    assert site.d1.requests[-1].handoff.ref.decode_epoch == 8


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
    await asyncio.wait_for(asyncio.gather(site.p.left.wait(), site.d1.left.wait()), 2)
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
    await asyncio.wait_for(site.router.drained(), 5)


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
