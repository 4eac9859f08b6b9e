"""F14, F20: a name or a transfer that is in flight is refused to a second, and the first is
unharmed; the same call again is answered as the first time."""

from __future__ import annotations

import asyncio

from pd_grpc.protocol import rpc
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import types_pb2
from tests.cluster import cluster
from tests.decode.wire import fault_of, tokens_of, wire
from tests.prefill.cluster import answer_to, request_to, running
from tests.system.asking import Reply, ask, request
from tests.waiting import LIMIT_S, until

AT_ONCE = 8
SAMPLING = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)


async def test_of_many_with_one_name_one_is_served_and_the_name_is_free_afterwards() -> None:
    """F14: equal bodies or not, a second answer to one name is refused."""
    async with cluster() as servers, servers.client() as stub:
        d = servers.decodes[0]
        taken = d.pool.reserve(d.pool.free, owner="the test")
        prompts = [[5, 6, 7 + n // 2] for n in range(AT_ONCE)]
        asked = [
            asyncio.create_task(ask(stub, request(prompt, SAMPLING, name="mine")))
            for prompt in prompts
        ]
        await until(lambda: sum(task.done() for task in asked) == AT_ONCE - 1)
        taken.release()
        d.runtime.wake()
        replies: list[Reply] = []
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(outcome, Reply):
                replies.append(outcome)
                continue
            fault = rpc.read_error(outcome)  # type: ignore[arg-type]
            assert isinstance(fault, Fault), fault
            assert (fault.code, fault.reason) == (Code.ALREADY_EXISTS, Reason.DUPLICATE_REQUEST)
        assert [len(reply.token_ids) for reply in replies] == [4]
        again = await ask(stub, request([5, 6, 7], SAMPLING, name="mine"))
        assert len(again.token_ids) == 4


async def test_ps_calls_may_be_repeated_and_change_nothing() -> None:
    """F14: the same ref and the same body is a replay; another body is refused."""
    async with wire() as d:
        p = await d.prefill()
        asked = d.request()
        call = d.generate(asked)
        grant = await p.allocate(asked)
        again = await p.allocate(asked, budget_s=50.0, max_wait_s=1.0)
        assert again == grant
        other = d.request(transfer_id=asked.transfer_id, max_tokens=asked.max_tokens + 1)
        refused = await fault_of(p.allocate(other))
        assert (refused.code, refused.reason) == (Code.ALREADY_EXISTS, Reason.DUPLICATE_TRANSFER)
        token, chunks = p.compute(asked)
        first = await p.first_token(asked, grant.grant_id, token)
        assert await p.first_token(asked, grant.grant_id, token) == first
        refused = await fault_of(p.first_token(asked, grant.grant_id, token + 1))
        assert refused.reason is Reason.DUPLICATE_TRANSFER
        await p.send_kv(asked, grant, chunks)
        assert await tokens_of(call) == d.answer(asked)
        finished = await p.release(asked)
        assert finished.state == types_pb2.TRANSFER_STATE_FINISHED
        assert await p.release(asked) == finished


async def test_a_transfer_id_that_two_prefills_use_at_once_is_the_first_ones() -> None:
    """F20: the second P, its caller and the second client are refused; nobody crashes."""
    async with running() as servers:
        p, thief, d = await servers.prefill(), await servers.prefill(), await servers.decode()
        held = p.pool.reserve(p.pool.free, owner="the test")
        mine = request_to(d, random_seed=1)
        theirs = request_to(d, random_seed=2)
        theirs.ref.CopyFrom(mine.ref)
        legs = asyncio.create_task(servers.run(p, d, mine))
        # D has granted it, and P cannot compute before the test lets it.
        await until(lambda: p.machine.placement.pool.granted == 1)
        transfers = d.machine.ledger.transfers
        await until(lambda: [t.client is not None for t in transfers.values()] == [True])
        for outcome in await servers.run(thief, d, theirs):
            assert isinstance(outcome.fault, Fault), outcome
            assert outcome.fault.reason in (Reason.DUPLICATE_TRANSFER, Reason.NOT_OWNER)
        held.release()
        p.runtime.wake()
        prefill, generate = await asyncio.wait_for(legs, LIMIT_S)
        assert (prefill.fault, generate.tokens) == (None, answer_to(mine))
        after = request_to(d, random_seed=3)
        assert (await servers.run(thief, d, after))[1].tokens == answer_to(after)
