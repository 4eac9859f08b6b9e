"""D's part of a trace, and that nothing of it is kept once a transfer has ended."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pd_grpc.decode.actions import Changed, StepPlan
from pd_grpc.decode.spans import DecodeSpans
from pd_grpc.decode.states import DecodeState as S
from pd_grpc.protocol.clock import SystemClock
from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.telemetry import names
from pd_grpc.telemetry.tracing import Tracing
from tests.decode.wire import CALL_S, fault_of, tokens_of, wire
from tests.waiting import until

P_TRACE, CLIENT_TRACE = "0" * 31 + "a", "0" * 31 + "b"


def parent(trace: str) -> Any:
    return (("traceparent", f"00-{trace}-{'1' * 16}-01"),)


def trace_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


def in_order(spans: list[ReadableSpan]) -> list[ReadableSpan]:
    """By beginning; the wait for a step begins with what it is a part of, and comes behind it."""
    return sorted(spans, key=lambda s: (s.start_time or 0, s.name == names.SPAN_STEP_WAIT))


def moment(span: ReadableSpan, name: str) -> int:
    """When something happened within a span, in ns."""
    (event,) = [each for each in span.events if each.name == name]
    return event.timestamp


async def test_a_hand_over_is_drawn_under_both_callers() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with wire(provider=provider) as d:
        p = await d.prefill()
        request = d.request(max_tokens=4)
        client = d.inference.Generate(
            request.generate(), timeout=CALL_S, metadata=parent(CLIENT_TRACE)
        )
        grant = await p.decode.Allocate(
            request.allocate(p.welcome.session_id), timeout=CALL_S, metadata=parent(P_TRACE)
        )
        token, chunks = p.compute(request)
        await p.first_token(request, grant.grant_id, token)
        await p.send_kv(request, grant, chunks)
        assert await tokens_of(client) == d.answer(request)
        spans = {span.name: span for span in exporter.get_finished_spans()}
        assert trace_of(spans[names.SPAN_RESERVE]) == P_TRACE
        assert trace_of(spans[names.SPAN_RECEIVE]) == P_TRACE
        assert trace_of(spans[names.SPAN_DECODE]) == CLIENT_TRACE
        step = spans[names.SPAN_STEP]
        assert [link.context for link in step.links] == [spans[names.SPAN_DECODE].context]
        for name in (names.SPAN_RESERVE, names.SPAN_RECEIVE, names.SPAN_DECODE):
            attributes = spans[name].attributes
            assert attributes is not None
            assert attributes[names.ATTR_TRANSFER_ID] == request.transfer_id
            assert attributes[names.ATTR_OUTCOME] == "ok"
        assert len(d.server.runtime.spans) == 0


async def test_a_request_of_our_own_is_computed_and_decoded_however_long_it_waited() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with wire(provider=provider) as d:
        p = await d.prefill()
        holder = d.request(prompt=list(range(100, 180)))
        await p.allocate(holder)
        waiting, own = d.request(prompt=list(range(300, 340)), max_tokens=4), d.request()
        answers = []
        # One after the other: of calls made together the later one may come first.
        for request in (waiting, own):
            call = d.inference.Generate(
                request.generate(True), timeout=CALL_S, metadata=parent(CLIENT_TRACE)
            )
            answers.append(asyncio.create_task(tokens_of(call)))
            await until(lambda: len(d.server.machine.ledger.reservations) == len(answers))
        await p.release(holder)
        assert await asyncio.gather(*answers) == [d.answer(waiting), d.answer(own)]
        of_transfer: dict[object, list[ReadableSpan]] = {}
        for span in exporter.get_finished_spans():
            if trace_of(span) == CLIENT_TRACE and names.ATTR_TRANSFER_ID in (span.attributes or {}):
                transfer = (span.attributes or {})[names.ATTR_TRANSFER_ID]
                of_transfer.setdefault(transfer, []).append(span)
        assert len(of_transfer) == 2
        for spans in of_transfer.values():
            queue, compute, decode, wait = in_order(spans)
            assert queue.name == names.SPAN_QUEUE and queue.end_time == compute.start_time
            assert compute.name == names.SPAN_COMPUTE and compute.end_time == decode.start_time
            assert (decode.name, wait.name) == (names.SPAN_DECODE, names.SPAN_STEP_WAIT)
            assert wait.start_time == decode.start_time
        assert len(d.server.runtime.spans) == 0


def test_one_put_aside_before_its_first_token_is_computed_until_it_decodes() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = DecodeSpans(Tracing(SystemClock(), "d", "decode", provider))
    key = TransferKey("local-1", 1)
    spans.client(key, 1, Context(), 1.0, local=True)
    path = [S.EXPECTED, S.RESERVED, S.RECEIVING, S.PREEMPTED, S.DECODING, S.PREEMPTED, S.DECODING]
    moves = pairwise([*path, S.FINISHED])
    for at, (before, after) in enumerate(moves, 2):
        if before is S.RECEIVING:
            spans.step_began(StepPlan(1, ("g",), (), (), ()), [key], [], at - 0.5)
        spans.changed(Changed(key, before, after, None), float(at))
    work = {span.name: span for span in exporter.get_finished_spans()}
    assert [e.name for e in work[names.SPAN_COMPUTE].events] == ["preempted", "decoding"]
    assert [e.name for e in work[names.SPAN_DECODE].events] == ["preempted", "decoding"]
    assert work[names.SPAN_COMPUTE].end_time == work[names.SPAN_DECODE].start_time
    assert len(spans) == 0


async def test_from_the_first_token_to_the_second_the_spans_adjoin() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with wire(provider=provider) as d:
        p = await d.prefill()
        request = d.request(max_tokens=24)
        client = d.generate(request)
        grant = await p.allocate(request)
        token, chunks = p.compute(request)
        await p.first_token(request, grant.grant_id, token)
        first = await anext(aiter(client))
        await p.send_kv(request, grant, chunks)
        assert [*first.token_ids, *await tokens_of(client)] == d.answer(request)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    receive, decode, wait = (
        spans[name] for name in (names.SPAN_RECEIVE, names.SPAN_DECODE, names.SPAN_STEP_WAIT)
    )
    assert wait.parent is not None and wait.parent.span_id == decode.context.span_id
    assert receive.end_time is not None and wait.end_time is not None
    # The first token came before the KV: what is left of it is the first thing waited for.
    assert moment(receive, names.EVENT_FIRST_TOKEN) < receive.end_time == decode.start_time
    assert wait.start_time == decode.start_time
    steps = [s for s in exporter.get_finished_spans() if s.name == names.SPAN_STEP]
    assert wait.end_time == steps[0].start_time
    assert steps[0].end_time is not None
    second = moment(decode, names.EVENT_SECOND_TOKEN)
    assert steps[0].end_time <= second


async def test_a_client_that_is_refused_takes_no_place_in_the_trace_of_the_right_one() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with wire(provider=provider) as d:
        p = await d.prefill()
        request = d.request(max_tokens=24)
        grant = await p.allocate(request)
        bad = d.request(transfer_id=request.transfer_id, prompt=[5000])
        assert (await fault_of(d.generate(bad))).reason is Reason.BAD_REQUEST
        client = d.inference.Generate(
            request.generate(), timeout=CALL_S, metadata=parent(CLIENT_TRACE)
        )
        token, chunks = p.compute(request)
        await p.first_token(request, grant.grant_id, token)
        await p.send_kv(request, grant, chunks)
        assert await tokens_of(client) == d.answer(request)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert trace_of(spans[names.SPAN_DECODE]) == CLIENT_TRACE
    assert moment(spans[names.SPAN_DECODE], names.EVENT_SECOND_TOKEN)


async def test_refused_calls_leave_nothing_behind_and_disturb_no_other() -> None:
    async with wire() as d:
        p = await d.prefill()
        request = d.request(max_tokens=24)
        call = d.generate(request)
        grant = await p.allocate(request)
        assert (await fault_of(d.generate(request))).reason is Reason.DUPLICATE_TRANSFER
        fault = await fault_of(p.allocate(request, prompt_tokens=5))
        assert fault.reason is Reason.DUPLICATE_TRANSFER
        assert len(d.server.runtime.spans) == 1
        for i in range(10):
            bad = d.request(transfer_id=f"bad-{i}", prompt=[5000])
            assert (await fault_of(d.generate(bad))).reason is Reason.BAD_REQUEST
            assert (await fault_of(p.allocate(bad, prompt_tokens=0))).reason is Reason.BAD_REQUEST
        assert len(d.server.runtime.spans) == 1
        token, chunks = p.compute(request)
        await p.first_token(request, grant.grant_id, token)
        await p.send_kv(request, grant, chunks)
        assert await tokens_of(call) == d.answer(request)
        await until(lambda: len(d.server.runtime.spans) == 0)


async def test_a_step_that_only_prefills_is_linked_to_what_it_computes() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with wire(provider=provider) as d:
        request = d.request(prompt=list(range(300, 340)), max_tokens=4)
        client = d.inference.Generate(
            request.generate(True), timeout=CALL_S, metadata=parent(CLIENT_TRACE)
        )
        assert await tokens_of(client) == d.answer(request)
    found = exporter.get_finished_spans()
    spans = {span.name: span for span in found}
    steps = [span for span in found if span.name == names.SPAN_STEP]
    linked = [[link.context for link in step.links] for step in steps]
    compute, decode = spans[names.SPAN_COMPUTE].context, spans[names.SPAN_DECODE].context
    assert linked[0] == [compute] and linked[-1] == [decode]
    assert all(each in ([compute], [decode]) for each in linked)
    assert len(linked) >= 4, "one that computes, three that decode"


async def test_what_no_caller_samples_makes_no_step_of_a_trace() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    left_out = (("traceparent", f"00-{CLIENT_TRACE}-{'1' * 16}-00"),)
    async with wire(provider=provider) as d:
        request = d.request(prompt=list(range(300, 340)), max_tokens=4)
        client = d.inference.Generate(request.generate(True), timeout=CALL_S, metadata=left_out)
        assert await tokens_of(client) == d.answer(request)
    assert exporter.get_finished_spans() == ()
