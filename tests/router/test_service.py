"""Answers of the router over real sockets, of instances whose part the test writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from opentelemetry.context import Context

from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.protocol.messages import seconds
from pd_grpc.v1 import inference_pb2, sampling_pb2, types_pb2
from tests.router.answers import (
    GREEDY,
    TEXT,
    hand_over,
    hello,
    rest_of,
)
from tests.router.conftest import VOCAB, Site
from tests.router.scripted import handed_off, last, tokens
from tests.waiting import until


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
    count = 10_000

    async def flood(request: Any) -> AsyncIterator[Any]:
        for _ in range(count // 10):
            yield tokens(*[TEXT[0]] * 10)
        yield last()

    messages = []

    def everything_has_come() -> bool:
        running = site.router.in_flight.running()
        return all(each.info().generated_tokens == count for each in running)

    async def write_slowly(message: inference_pb2.GenerateResponse) -> None:
        messages.append(message)
        await until(everything_has_come)

    site.p.script, site.d1.script = hand_over, flood
    request = inference_pb2.GenerateRequest(text="hi", sampling=GREEDY)
    await site.router.service.route(request, 60, Context(), write_slowly)
    assert sum(len(m.token_ids) for m in messages) == count
    assert "".join(m.text for m in messages) == "h" * count
    assert 3 <= len(messages) < 50, "what has piled up goes in one message, of bounded size"
