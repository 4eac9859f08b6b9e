"""F7: each of several answers to one prompt is a request of its own, and what comes early is kept.

P and D answer once: a request for several is refused by name, and the router's n choices are n
transfers, as in tests/system/test_choices.py."""

from __future__ import annotations

import asyncio

import pytest

from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.v1 import sampling_pb2, types_pb2
from tests.decode.wire import Wire, tokens_of, wire
from tests.prefill.cluster import answer_to, request_to, running
from tests.waiting import LIMIT_S, until

SIBLINGS = 4


async def test_more_than_one_answer_is_refused_by_name_on_p_and_on_d() -> None:
    """F7: refused whole, so that no sibling is left behind."""
    async with running() as cluster:
        p, d = await cluster.prefill(), await cluster.decode()
        several = request_to(d, n=2)
        for outcome in await cluster.run(p, d, several):
            assert isinstance(outcome.fault, Fault)
            assert (outcome.fault.code, outcome.fault.reason) == (
                Code.UNIMPLEMENTED,
                Reason.FEATURE,
            )
            assert outcome.fault.metadata["feature"] == "sampling.n"


async def test_a_sibling_that_is_cancelled_strands_none_of_the_others() -> None:
    """F7: n transfers of one prompt, one of which is given up while all wait for blocks."""
    async with running() as cluster:
        p, d = await cluster.prefill(), await cluster.decode()
        taken = d.pool.reserve(d.pool.free, owner="the test")
        asked = [request_to(d, seed=n) for n in range(SIBLINGS)]
        assert len({tuple(r.tokens) for r in asked}) == 1
        legs = [asyncio.create_task(cluster.run(p, d, r)) for r in asked]
        await until(lambda: p.machine.placement.pool.in_flight == SIBLINGS)
        legs[1].cancel()
        await asyncio.wait([legs[1]])
        taken.release()
        d.runtime.wake()
        for n in (0, 2, 3):
            prefill, generate = await asyncio.wait_for(legs[n], LIMIT_S)
            assert (prefill.fault, generate.tokens) == (None, answer_to(asked[n]))


async def _client_last(d: Wire) -> tuple[list[int], list[int]]:
    p = await d.prefill()
    request = d.request()
    await p.hand_over(request)
    return await tokens_of(d.generate(request)), d.answer(request)


async def _client_first(d: Wire) -> tuple[list[int], list[int]]:
    p = await d.prefill()
    request = d.request()
    call = d.generate(request)
    await d.until_state(request, "EXPECTED")
    await p.hand_over(request)
    return await tokens_of(call), d.answer(request)


async def _first_token_last(d: Wire) -> tuple[list[int], list[int]]:
    p = await d.prefill()
    request = d.request()
    grant = await p.allocate(request)
    token, chunks = p.compute(request)
    await p.send_kv(request, grant, chunks)
    await d.until_state(request, "READY")
    call = d.generate(request)
    await p.first_token(request, grant.grant_id, token)
    return await tokens_of(call), d.answer(request)


async def _only_token_before_the_client(d: Wire) -> tuple[list[int], list[int]]:
    p = await d.prefill()
    request = d.request(max_tokens=1)
    sampling = sampling_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling)
    grant = await p.allocate(request, kv_needed=False)
    token, _ = p.compute(request)
    done = await p.first_token(request, grant.grant_id, token, types_pb2.FINISH_REASON_LENGTH)
    assert done.state == types_pb2.TRANSFER_STATE_FINISHED
    return await tokens_of(d.generate(request)), d.answer(request)


@pytest.mark.parametrize(
    "order", [_client_last, _client_first, _first_token_last, _only_token_before_the_client]
)
async def test_whatever_comes_early_is_kept(order: object) -> None:
    """F7: the client, the KV and the first token may each come first."""
    async with wire() as d:
        shown, expected = await order(d)  # type: ignore[operator]
        assert shown == expected
