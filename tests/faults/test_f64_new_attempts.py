"""F64: what was given back is never filled again: only a new attempt brings the request back."""

from __future__ import annotations

from pd_grpc.protocol.faults import Code, Fault, Reason
from tests.decode.wire import fault_of, tokens_of, wire
from tests.prefill.cluster import answer_to, request_to, running


async def test_a_second_stream_into_blocks_that_were_given_back_is_refused() -> None:
    """F64: on D, which has given the blocks to the next request already."""
    async with wire() as d:
        p = await d.prefill()
        old = d.request()
        grant = await p.allocate(old)
        sending = await p.open(old, grant)
        await sending.read()
        await p.release(old, Fault(Reason.SENDER_STUCK, "the test"))
        await fault_of(sending)
        next_one = d.request(prompt=list(range(400, 480)))
        call = d.generate(next_one)
        next_grant = await p.allocate(next_one)
        refused = await fault_of(await p.open(old, grant))
        assert refused.reason is Reason.SENDER_STUCK, "it hears how the first one ended"
        refused = await fault_of(p.allocate(old))
        assert (refused.code, refused.reason) == (Code.ABORTED, Reason.RELEASED)
        token, next_chunks = p.compute(next_one)
        await p.first_token(next_one, next_grant.grant_id, token)
        await p.send_kv(next_one, next_grant, next_chunks)
        assert await tokens_of(call) == d.answer(next_one)

        retry = d.request(transfer_id=old.transfer_id, attempt=2)
        call = d.generate(retry)
        await p.hand_over(retry)
        assert await tokens_of(call) == d.answer(old)
        assert (await fault_of(p.allocate(old))).reason is Reason.RELEASED


async def test_a_request_that_has_ended_is_repeated_under_a_new_attempt_alone() -> None:
    """F64: through a real P, after the answer and all KV are gone."""
    async with running() as cluster:
        p, d = await cluster.prefill(), await cluster.decode()
        request = request_to(d)
        assert (await cluster.run(p, d, request))[1].tokens == answer_to(request)
        await cluster.all_returned()
        prefill = await cluster.run_prefill(p, request)
        assert isinstance(prefill.fault, Fault)
        assert (prefill.fault.code, prefill.fault.reason) == (Code.ABORTED, Reason.RELEASED)
        request.ref.attempt = 2
        prefill, generate = await cluster.run(p, d, request)
        assert (prefill.fault, generate.tokens) == (None, answer_to(request))
