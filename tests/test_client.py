"""The Python client, blocking and asynchronous, against a router with scripted instances."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind

from pd_grpc.client import STAGES, Answer, AsyncClient, Client, Fault, RequestError, TransportFault
from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.protocol.faults import Code, Reason
from pd_grpc.v1.sampling_pb2 import StructuredOutput
from tests.router.conftest import VOCAB, Site
from tests.router.conftest import early_site as early_site  # the fixtures
from tests.router.conftest import site as site
from tests.router.scripted import handed_off, last, never, tokens
from tests.telemetry.recorder import Recorder
from tests.waiting import LIMIT_S, until

TEXT = SimTokenizer(VOCAB).encode("hello")


async def hand_over(request: Any) -> AsyncIterator[Any]:
    yield handed_off(queue=1, compute=3)


async def say_hello(request: Any) -> AsyncIterator[Any]:
    yield tokens(*TEXT[:2])
    yield last(*TEXT[2:])


async def one_token_then_silence(request: Any) -> AsyncIterator[Any]:
    yield tokens(TEXT[0])
    await never()


async def silence(request: Any) -> AsyncIterator[Any]:
    await never()
    yield


def check(answer: Answer) -> None:
    assert answer.text == "hello"
    assert answer.token_ids == TEXT
    assert answer.end is not None
    assert (answer.end.finish_reason, answer.end.prompt_tokens) == ("length", 3)
    assert (answer.end.prefill_instance, answer.end.decode_instance) == ("p1", "from-d")
    assert set(answer.end.timings_ms) == set(STAGES)
    assert answer.end.timings_ms["compute"] == 3.0


async def test_an_answer_comes_whole(site: Site) -> None:
    site.p.script, site.d1.script = hand_over, say_hello
    async with AsyncClient(site.router.endpoint) as client:
        generation = client.generate("hi", max_tokens=5, temperature=0, request_id="mine")
        check(await generation.collect())
        assert generation.request_id == "mine"


async def test_the_blocking_client_says_the_same(site: Site) -> None:
    site.p.script, site.d1.script = hand_over, say_hello

    def ask() -> Answer:
        with Client(site.router.endpoint) as client:
            return client.generate(token_ids=[1, 2], max_tokens=5).collect()

    check(await asyncio.to_thread(ask))


async def test_every_option_reaches_the_instances(site: Site) -> None:
    site.p.script, site.d1.script = hand_over, say_hello
    async with AsyncClient(site.router.endpoint) as client:
        await client.generate(
            messages=[("user", "hi")],
            max_tokens=9,
            min_tokens=1,
            temperature=0.5,
            top_p=0.25,
            top_k=3,
            seed=7,
            stop=["x", "y"],
            stop_token_ids=[4],
            ignore_eos=True,
            logprobs=2,
            min_p=0.125,
            presence_penalty=-1.5,
            frequency_penalty=1.5,
            repetition_penalty=1.25,
            logit_bias={5: -100.0, 7: 2.5},
            json_schema={"type": "string", "pattern": "é"},
            generated_token_ids=[8],
            cache_salt=b"tenant-7",
        ).collect()
    sampling = site.p.requests[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (9, 1)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
    assert (sampling.seed, sampling.ignore_eos, sampling.logprobs) == (7, True, 2)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.125, 1.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1.5, 1.5)
    assert dict(sampling.logit_bias) == {5: -100.0, 7: 2.5}
    assert sampling.structured_output.json_schema == '{"type": "string", "pattern": "é"}'
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["x", "y"], [4])
    assert list(site.p.requests[0].generated_token_ids) == [8]
    assert site.p.requests[0].scope.cache_salt == b"tenant-7"


@pytest.mark.parametrize(
    ("option", "grammar"),
    [
        ({"regex": "[0-9]+"}, StructuredOutput(regex="[0-9]+")),
        ({"json_schema": '{ "type":"null" }'}, StructuredOutput(json_schema='{ "type":"null" }')),
    ],
)
async def test_a_grammar_that_is_text_reaches_the_instances_as_it_is(
    option: Any, grammar: StructuredOutput, site: Site
) -> None:
    site.p.script, site.d1.script = hand_over, say_hello
    async with AsyncClient(site.router.endpoint) as client:
        await client.generate("hi", **option).collect()
    for instance in (site.p, site.d1):
        assert instance.requests[0].sampling.structured_output == grammar


async def test_a_refusal_is_a_fault_with_its_fields(site: Site) -> None:
    async with AsyncClient(site.router.endpoint) as client:
        with pytest.raises(Fault) as raised:
            await client.generate("hi", temperature=float("nan")).collect()
    assert raised.value.reason is Reason.BAD_REQUEST
    assert raised.value.fields[0].field == "sampling.temperature"


def test_a_router_that_is_not_there_is_a_transport_fault() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(TransportFault) as raised:
        client.generate("hi", timeout_s=5).collect()
    assert raised.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "exactly one"),
        ({"text": "a", "token_ids": [1]}, "exactly one"),
        ({"text": "a", "seed": -1}, "seed: must be at least 0, not -1"),
        ({"text": "a", "max_tokens": 2**40}, f"max_tokens: must be at most {2**31 - 1}, not"),
        ({"text": "a", "max_token": 1}, "max_token: "),
        ({"text": "a\udcff"}, "text: must be text that UTF-8 can carry"),
        ({"messages": [("user", "a\udcff")]}, "messages: must be text that UTF-8 can carry"),
        ({"text": "a", "stop": ["a\udcff"]}, "stop: must be text that UTF-8 can carry"),
        ({"text": "a", "regex": "a\udcff"}, "regex: must be text that UTF-8 can carry"),
        ({"text": "a", "regex": 5}, "regex: must be text, not int"),
        ({"text": "a", "json_schema": [1]}, "json_schema: must be text or a mapping, not list"),
        ({"text": "a", "json_schema": {"enum": [b"a"]}}, "json_schema: .*bytes is not JSON"),
        ({"text": "a", "regex": "a", "json_schema": {}}, "regex: cannot be .* beside json_schema"),
        ({"text": "a", "timeout_s": 0}, "timeout_s: must be above 0"),
        ({"text": "a", "timeout_s": -3.0}, "timeout_s: must be above 0"),
        ({"text": "a", "timeout_s": float("nan")}, "timeout_s: must be above 0"),
        ({"text": "a", "timeout_s": 1e10}, "timeout_s: must be .* at most 1000000000 seconds"),
    ],
)
def test_what_the_wire_cannot_carry_is_a_value_error_that_names_the_argument(
    arguments: dict[str, Any], says: str
) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(ValueError, match=says):
        client.generate(**arguments)


@pytest.mark.parametrize("endpoint", ["", "foo", "h:99999999"])
async def test_an_endpoint_that_is_none_is_refused_before_grpc_sees_it(endpoint: str) -> None:
    for connect in (Client, AsyncClient):
        with pytest.raises(RequestError, match=r"endpoint: must (be host:port|have a port)"):
            connect(endpoint)


async def test_leaving_the_block_ends_the_request_on_both_instances(site: Site) -> None:
    site.p.script, site.d1.script = silence, one_token_then_silence
    async with AsyncClient(site.router.endpoint) as client:
        async with client.generate("hi") as generation:
            await anext(generation)
        await asyncio.wait_for(asyncio.gather(site.p.left.wait(), site.d1.left.wait()), LIMIT_S)


async def test_cancelling_the_task_that_reads_ends_the_request(site: Site) -> None:
    site.p.script, site.d1.script = silence, one_token_then_silence
    async with AsyncClient(site.router.endpoint) as client:
        generation = client.generate("hi")
        await anext(generation)
        reading = asyncio.create_task(generation.collect())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait_for(asyncio.gather(site.p.left.wait(), site.d1.left.wait()), LIMIT_S)
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_a_blocking_loop_that_breaks_off_ends_the_request(site: Site) -> None:
    site.p.script, site.d1.script = silence, one_token_then_silence

    def ask() -> str:
        with Client(site.router.endpoint) as client, client.generate("hi") as generation:
            return next(generation).text

    assert await asyncio.to_thread(ask) == "h"
    await asyncio.wait_for(asyncio.gather(site.p.left.wait(), site.d1.left.wait()), LIMIT_S)


async def test_a_timeout_is_the_requests_budget(early_site: Site) -> None:
    site = early_site
    site.p.script, site.d1.script = silence, silence
    async with AsyncClient(site.router.endpoint) as client:
        with pytest.raises(Fault) as raised:
            await client.generate("hi", timeout_s=4.0).collect()
    assert raised.value.reason is Reason.STAGE_DEADLINE


async def test_a_request_continues_the_current_trace(site: Site) -> None:
    site.p.script, site.d1.script = hand_over, say_hello
    tracer = TracerProvider().get_tracer("test")
    async with AsyncClient(site.router.endpoint) as client:
        with tracer.start_as_current_span("caller") as span:
            generation = client.generate("hi")
            await generation.collect()
            assert generation.trace_id == trace.format_trace_id(span.get_span_context().trace_id)
    assert site.p.metadata[0]["traceparent"].split("-")[1] == generation.trace_id


async def test_a_request_outside_any_span_begins_a_trace_of_its_own(site: Site) -> None:
    site.p.script, site.d1.script, site.d2.script = hand_over, say_hello, say_hello
    async with AsyncClient(site.router.endpoint) as client:
        first, second = client.generate("hi"), client.generate("hi")
        await asyncio.gather(first.collect(), second.collect())
    assert len({first.trace_id, second.trace_id}) == 2
    traces = {m["traceparent"].split("-")[1] for m in site.p.metadata}
    assert traces == {first.trace_id, second.trace_id}


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_request_is_a_span_of_a_process_that_records_them(
    site: Site, blocking: bool
) -> None:
    recorder = Recorder()
    site.p.script, site.d1.script = hand_over, say_hello
    providers = {"tracer_provider": recorder.provider, "meter_provider": recorder.meters}

    def ask() -> str:
        with Client(site.router.endpoint, **providers) as client:  # type: ignore[arg-type]
            with client.generate("hi") as generation:
                generation.collect()
            return generation.trace_id

    if blocking:
        found = await asyncio.to_thread(ask)
    else:
        async with AsyncClient(site.router.endpoint, **providers) as client:  # type: ignore[arg-type]
            generation = client.generate("hi")
            await generation.collect()
            found = generation.trace_id
    await until(lambda: bool(recorder.spans))
    span = recorder.span("pd_grpc.v1.InferenceService/Generate")
    assert span.kind is SpanKind.CLIENT and span.parent is None
    assert span.context is not None
    assert found == trace.format_trace_id(span.context.trace_id)
    assert site.p.metadata[0]["traceparent"].split("-")[1] == found
    assert recorder.points("rpc.client.call.duration")


async def test_what_is_served_is_told(site: Site) -> None:
    async with AsyncClient(site.router.endpoint) as client:
        assert (await client.model_info()).model == "scripted"


def test_the_client_alone_needs_no_engine() -> None:
    code = (
        "import sys, pd_grpc.client\n"
        "heavy = ('torch', 'transformers', 'numpy', 'pd_grpc.engine', 'pd_grpc.protocol.serving')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False
    )
    assert run.stdout.strip() == "[]", run.stderr
