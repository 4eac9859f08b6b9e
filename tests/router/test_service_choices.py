"""Several choices of one request over real sockets, of instances whose part the test writes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from opentelemetry.context import Context

from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.protocol import rpc
from pd_grpc.protocol.choices import choice_seed
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.router.fan_out import FanOut
from pd_grpc.router.unread import Unread
from pd_grpc.telemetry import names
from pd_grpc.v1 import admin_pb2, inference_pb2, sampling_pb2, types_pb2
from tests.router.answers import TEXT, hand_over, hello, rest_of, say_hello, silence
from tests.router.choosing import N, by_choice, generated, of_choice, pausing, several, tokens_of
from tests.router.conftest import VOCAB, Site, sited
from tests.router.pairs import STUCK, go_on, pairs, saying
from tests.router.scripted import last, tokens
from tests.router.test_service_operation import _left_of_requests
from tests.system.test_metrics import Read
from tests.waiting import LIMIT_S, until


async def fault_behind(call: Any) -> Fault:
    """What a call ends with of which everything else has been read."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rest_of(call)
    fault = rpc.read_error(raised.value)
    assert isinstance(fault, Fault)
    return fault


# --- what the client and the instances see --------------------------------------------------------


async def test_each_choice_is_an_answer_and_the_last_message_of_all_has_the_total(
    site: Site,
) -> None:
    hello(site)
    messages = await site.answer(request_id="mine", sampling=several())
    choices = by_choice(messages)
    assert sorted(choices) == [0, 1, 2]
    for said in choices.values():
        assert tokens_of(said) == TEXT
        assert "".join(message.text for message in said) == "héllo"
        assert [bool(m.finish_reason) for m in said] == [False] * (len(said) - 1) + [True]
        assert (said[-1].usage.prompt_tokens, said[-1].usage.completion_tokens) == (3, 9)
        assert (said[-1].prefill_instance, said[-1].decode_instance) == ("p1", "from-d")
        assert said[-1].HasField("timings")
    assert [message.request_id for message in messages] == ["mine"] + [""] * (len(messages) - 1)
    assert [message.HasField("total_usage") for message in messages].index(True) + 1 == len(
        messages
    )
    total = types_pb2.Usage(prompt_tokens=3, completion_tokens=N * 9)
    assert messages[-1].total_usage == total


async def test_an_answer_that_is_alone_has_neither_number_nor_total(site: Site) -> None:
    hello(site)
    for n in (0, 1):
        messages = await site.answer(sampling=several(n))
        assert {message.choice for message in messages} == {0}
        assert not messages[-1].HasField("total_usage")
        assert site.p.requests[-1].sampling.n == 0


async def test_each_choice_is_a_transfer_of_one_answer_with_its_own_seed(site: Site) -> None:
    hello(site)
    await site.answer(sampling=several(), request_id="mine")
    legs = [*site.p.requests, *site.d1.requests, *site.d2.requests]
    assert {leg.sampling.n for leg in legs} == {0}
    assert {leg.request_id for leg in legs} == {"mine"}
    seeds = [choice_seed(5, choice) for choice in range(N)]
    assert [leg.sampling.seed for leg in site.p.requests] == seeds
    ids = [leg.ref.transfer_id for leg in site.p.requests]
    assert len({*ids}) == N
    of_decode = {leg.handoff.ref.transfer_id: leg.sampling.seed for leg in site.d1.requests}
    assert of_decode == dict(zip(ids, seeds, strict=True)), "all go to the D of the first"


async def test_without_a_seed_the_router_mints_one_for_all_and_greedy_ones_need_none(
    site: Site,
) -> None:
    hello(site)
    await site.answer(sampling=sampling_pb2.SamplingParams(max_tokens=9, n=2))
    minted = [leg.sampling.seed for leg in site.p.requests]
    assert minted[1] == choice_seed(minted[0], 1)
    await site.answer(sampling=sampling_pb2.SamplingParams(max_tokens=9, n=2, temperature=0))
    assert not any(leg.sampling.HasField("seed") for leg in site.p.requests[2:])


@pytest.mark.parametrize("n", [129, 2**32 - 1])
async def test_too_many_are_refused_by_name_with_the_limit(n: int, site: Site) -> None:
    fault = await site.fault(sampling=several(n, top_k=-1))
    assert (fault.code, fault.reason) == (Code.INVALID_ARGUMENT, Reason.BAD_REQUEST)
    told = {each.field: each.description for each in fault.fields}
    assert told["sampling.n"] == "must be at most 128" and "sampling.top_k" in told
    assert not site.p.requests


# --- how they end ---------------------------------------------------------------------------------


async def test_a_client_that_leaves_ends_every_choice(site: Site) -> None:
    site.p.script, site.d1.script = hand_over, saying(2)
    call = site.generate(sampling=several())
    seen: set[int] = set()
    while len(seen) < N:
        seen.add((await call.read()).choice)
    call.cancel()
    await asyncio.wait_for(site.router.in_flight.idle(), LIMIT_S)
    states = site.router.in_flight.ended_counts
    assert states == {types_pb2.TRANSFER_STATE_CANCELLED: N}


async def test_one_that_fails_for_good_fails_them_all_after_what_they_have_said(
    site: Site,
) -> None:
    broken = Fault(Reason.ENGINE_ERROR, "it broke")
    may_fail = asyncio.Event()

    async def fails(request: Any) -> AsyncIterator[Any]:
        yield tokens(*TEXT[:3])
        await may_fail.wait()
        raise broken

    site.p.script, site.d1.script = hand_over, of_choice(say_hello, fails, saying(2))
    call = site.generate(sampling=several())
    seen: list[inference_pb2.GenerateResponse] = []
    while {c: len(tokens_of(m)) for c, m in by_choice(seen).items()} != {0: 6, 1: 3, 2: 2}:
        seen.append(await call.read())
    may_fail.set()
    fault = await fault_behind(call)
    assert (fault.reason, fault.metadata["choice"]) == (Reason.ENGINE_ERROR, "1")
    await asyncio.wait_for(site.d1.left.wait(), LIMIT_S)
    await asyncio.wait_for(site.router.in_flight.idle(), LIMIT_S)
    ended = site.router.in_flight.ended_counts
    assert ended == {
        types_pb2.TRANSFER_STATE_FINISHED: 1,
        types_pb2.TRANSFER_STATE_FAILED: 1,
        types_pb2.TRANSFER_STATE_CANCELLED: 1,
    }


async def test_one_that_fails_while_the_client_reads_nothing_takes_no_token_along(
    site: Site,
) -> None:
    """Also the answer of a choice that had all but its last word from P: it does not end as if it
    were whole."""
    messages: list[inference_pb2.GenerateResponse] = []
    may_fail, failed = asyncio.Event(), asyncio.Event()

    async def fails(request: Any) -> AsyncIterator[Any]:
        yield tokens(*TEXT[:3])
        await may_fail.wait()
        raise Fault(Reason.ENGINE_ERROR, "it broke")

    async def write(message: inference_pb2.GenerateResponse) -> None:
        messages.append(message)
        if len(messages) == 1:
            await until(lambda: generated(site) == [6, 3, 2])
            may_fail.set()
            one = site.router.in_flight.running()[1]
            await until(lambda: one.info().HasField("last_error"))
            failed.set()

    site.p.script, site.d1.script = hand_over, of_choice(say_hello, fails, saying(2))
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]), sampling=several()
    )
    with pytest.raises(Fault) as raised:
        await site.router.service.route(request, 60, Context(), write)
    assert failed.is_set() and raised.value.metadata["choice"] == "1"
    assert {c: tokens_of(m) for c, m in by_choice(messages).items()} == {
        0: TEXT,
        1: TEXT[:3],
        2: TEXT[:2],
    }
    assert [m.choice for m in messages if m.finish_reason] == [0]


async def test_one_that_is_refused_for_lack_of_blocks_fails_the_others(site: Site) -> None:
    lacks = Fault(Reason.NO_BLOCKS, "none free", {})

    async def refuses(request: Any) -> AsyncIterator[Any]:
        if request.sampling.seed == choice_seed(5, 2):
            raise lacks
        async for message in hand_over(request):
            yield message

    site.p.script, site.d1.script = refuses, of_choice(saying(2), saying(2), silence)
    fault = await site.fault(sampling=several())
    assert (fault.code, fault.reason) == (Code.RESOURCE_EXHAUSTED, Reason.NO_BLOCKS)
    assert fault.metadata["choice"] == "2"


async def test_an_operator_who_releases_one_ends_the_request(site: Site) -> None:
    site.p.script, site.d1.script = hand_over, saying(2)
    reading = asyncio.create_task(site.fault(sampling=several()))
    await until(lambda: generated(site) == [2, 2, 2])
    of_last = site.router.in_flight.running()[2].key.transfer_id
    release = admin_pb2.ReleaseTransferRequest(transfer_id=of_last)
    await site.admin.ReleaseTransfer(release)
    fault = await reading
    assert (fault.reason, fault.metadata["choice"]) == (Reason.RELEASED, "2")


async def test_a_drain_whose_time_is_over_ends_those_that_run(site: Site) -> None:
    site.p.script, site.d1.script = hand_over, saying(2)
    reading = asyncio.create_task(site.fault(sampling=several()))
    await until(lambda: generated(site) == [2, 2, 2])
    site.router.drain(0.0)
    assert (await reading).reason is Reason.DRAINING


async def test_the_budget_of_the_request_is_that_of_every_choice(site: Site) -> None:
    site.p.script, site.d1.script = hand_over, saying(2)
    with pytest.raises(Exception, match="DEADLINE_EXCEEDED"):
        async for _ in site.generate(timeout=1.0, sampling=several()):
            pass
    assert len(site.d1.time_left) == N
    assert all(0 < left <= 1.0 for left in site.d1.time_left)


async def test_a_slow_reader_gets_every_token_of_every_choice_in_few_messages(
    site: Site,
) -> None:
    count = 2000

    async def flood(request: Any) -> AsyncIterator[Any]:
        for _ in range(count // 10):
            yield tokens(*[TEXT[0]] * 10)
        yield last()

    messages: list[inference_pb2.GenerateResponse] = []

    async def write_slowly(message: inference_pb2.GenerateResponse) -> None:
        messages.append(message)
        await until(lambda: generated(site) == [count] * N)

    site.p.script, site.d1.script = hand_over, flood
    request = inference_pb2.GenerateRequest(text="hi", sampling=several())
    await site.router.service.route(request, 60, Context(), write_slowly)
    assert {c: tokens_of(m) for c, m in by_choice(messages).items()} == dict.fromkeys(
        range(N), [TEXT[0]] * count
    )
    assert len(messages) < 20


@pytest.mark.parametrize("logprobs", [0, 3])
async def test_of_answers_that_nobody_reads_no_more_waits_than_may(logprobs: int) -> None:
    count, each, most = 6000, 10, 1000
    size = each * (2 + logprobs if logprobs else 1)

    async def flood(request: Any) -> AsyncIterator[Any]:
        for _ in range(count // each):
            said = tokens(*[TEXT[0]] * each)
            for _ in range(each if logprobs else 0):
                top = [types_pb2.TokenLogprob(token_id=1)] * logprobs
                said.logprobs.add(chosen=top[0], top=top)
            yield said
        yield last()

    messages: list[inference_pb2.GenerateResponse] = []
    waiting = 0

    async with sited(SimTokenizer(VOCAB), unread_tokens=most) as site:

        def unread() -> int:
            (of_all,) = {each._unread for each in site.router.in_flight.running()}  # type: ignore[attr-defined]
            assert isinstance(of_all, Unread), "one for all choices"
            return of_all.waiting

        async def write_late(message: inference_pb2.GenerateResponse) -> None:
            nonlocal waiting
            messages.append(message)
            if len(messages) > 1:
                return
            await until(lambda: unread() >= most)
            for _ in range(20):
                # As long as this takes D could go on, and has more to say.
                await site.admin.ListTransfers(admin_pb2.ListTransfersRequest())
            waiting = unread()

        site.p.script, site.d1.script = hand_over, flood
        request = inference_pb2.GenerateRequest(text="hi", sampling=several())
        await site.router.service.route(request, 60, Context(), write_late)
    assert most <= waiting < most + N * size, "each leg has read one message at the most beyond it"
    assert {c: tokens_of(m) for c, m in by_choice(messages).items()} == dict.fromkeys(
        range(N), [TEXT[0]] * count
    )


async def test_a_stop_string_ends_the_text_of_one_choice_alone(site: Site) -> None:
    async def stops(request: Any) -> AsyncIterator[Any]:
        yield last(*TEXT[:5], reason=types_pb2.FINISH_REASON_STOP)

    site.p.script, site.d1.script = hand_over, of_choice(say_hello, stops)
    messages = await site.answer(sampling=several(2, stop=["ll"]))
    choices = by_choice(messages)
    texts = {c: "".join(m.text for m in said) for c, said in choices.items()}
    assert texts == {0: "hé", 1: "hé"}
    ends = {c: said[-1].finish_reason for c, said in choices.items()}
    assert ends == {0: types_pb2.FINISH_REASON_LENGTH, 1: types_pb2.FINISH_REASON_STOP}


async def test_a_choice_whose_instance_fails_goes_on_elsewhere_and_the_others_where_they_are() -> (
    None
):
    async with pairs() as site:
        site.p1.script = site.p2.script = hand_over
        go_ahead = asyncio.Event()
        site.d1.script = of_choice(pausing(2, go_ahead), saying(4, STUCK), say_hello)
        site.d2.script = go_on
        call = site.ask(sampling=several())
        seen: list[inference_pb2.GenerateResponse] = []
        while tokens_of(by_choice(seen).get(1, [])) != TEXT:
            seen.append(await call.read())
        assert tokens_of(by_choice(seen)[0]) == TEXT[:2]
        (again,) = site.d2.requests
        assert list(again.generated_token_ids) == TEXT[:4]
        assert again.sampling.seed == choice_seed(5, 1)
        go_ahead.set()
        seen += await asyncio.wait_for(rest_of(call), LIMIT_S)
    choices = by_choice(seen)
    assert {c: tokens_of(said) for c, said in choices.items()} == dict.fromkeys(range(N), TEXT)
    assert seen[-1].total_usage.completion_tokens == 9 + len(TEXT) + 9, "as each D counts"


# --- what is told of them -------------------------------------------------------------------------


async def test_a_request_is_measured_once_however_many_choices_it_has() -> None:
    async with pairs() as site:
        site.p1.script = site.p2.script = hand_over
        site.d1.script = site.d2.script = say_hello
        await site.answer(sampling=several())
        await site.router.in_flight.idle()
        read = Read(site.metrics)
        for metric in (
            names.METRIC_TTFT,
            names.METRIC_TPOT,
            names.METRIC_REQUEST_DURATION,
            names.METRIC_SECOND_TOKEN_GAP,
        ):
            (point,) = read.points(metric)
            assert point.count == 1, metric
        (route,) = read.points(names.METRIC_STAGE_DURATION, stage="route")
        assert route.count == 1
        assert [point.value for point in read.points(names.METRIC_DECISION)] == [1]


async def test_the_span_of_a_request_has_one_for_each_choice(site: Site) -> None:
    hello(site)
    await site.answer(sampling=several(), request_id="mine")
    await site.router.in_flight.idle()
    spans = site.spans.get_finished_spans()
    (whole,) = [span for span in spans if span.name == names.SPAN_REQUEST]
    choices = [span for span in spans if span.name == names.SPAN_CHOICE]
    told: list[dict[str, Any]] = [dict(span.attributes or {}) for span in choices]
    assert whole.context is not None
    assert {span.parent.span_id for span in choices if span.parent} == {whole.context.span_id}
    assert sorted(each[names.ATTR_CHOICE] for each in told) == [0, 1, 2]
    assert {each[names.ATTR_TRANSFER_ID] for each in told} == {
        leg.ref.transfer_id for leg in site.p.requests
    }
    assert {each[names.ATTR_REQUEST_ID] for each in told} == {"mine"}
    assert {each[names.ATTR_OUTCOME] for each in told} == {"ok"}
    of_request = dict(whole.attributes or {})
    assert of_request[names.ATTR_OUTPUT_TOKENS] == N * len(TEXT)
    assert names.ATTR_TRANSFER_ID not in of_request
    routes = [span for span in spans if span.name == names.SPAN_ROUTE]
    assert len(routes) == 1 + N


async def test_nothing_of_the_choices_waits_to_be_collected(site: Site) -> None:
    hello(site)
    gc.collect()
    gc.disable()
    try:
        await site.answer(sampling=several())
        await asyncio.wait_for(site.router.in_flight.idle(), LIMIT_S)
        await until(lambda: not _left_of_requests())
        assert not [each for each in gc.get_objects() if type(each) is FanOut]
    finally:
        gc.enable()
