"""F11, F22, F30: a handshake that fails, a peer that is another one than before, connections that
went while nobody used them: each costs at most its own request."""

from __future__ import annotations

import asyncio
from typing import Any

from pd_grpc.conformance.router.line import Line
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.router.server import start_router
from pd_grpc.v1 import inference_pb2_grpc
from tests.faults.silent_line import silent_line
from tests.lines import line_to
from tests.prefill.cluster import answer_to, request_to, running
from tests.system.asking import ask, request
from tests.waiting import until

GREEDY = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)


async def test_a_failed_handshake_is_that_requests_and_the_engines_go_on() -> None:
    """F11"""
    async with running() as cluster:
        p, good = await cluster.prefill(), await cluster.decode()
        unlike = await cluster.decode(block_size=8)
        before = request_to(good, random_seed=1)
        leg = asyncio.create_task(cluster.run(p, good, before))
        outcome = await cluster.run_prefill(p, request_to(unlike))
        assert isinstance(outcome.fault, Fault)
        assert outcome.fault.reason is Reason.LAYOUT_MISMATCH
        assert outcome.fault.for_client().code is Code.UNAVAILABLE
        assert (await leg)[1].tokens == answer_to(before)
        for d in (good, unlike):
            assert d.control.ready and p.control.ready
        after = request_to(good, random_seed=2)
        assert (await cluster.run(p, good, after))[1].tokens == answer_to(after)


async def test_ports_of_an_earlier_process_at_the_same_address_are_forgotten() -> None:
    """F22: D comes back behind its address with another shard, P behind its own with nothing."""
    async with running() as cluster:
        p, d = await cluster.prefill(name="p"), await cluster.decode(name="d")
        first = request_to(d, random_seed=1)
        assert (await cluster.run(p, d, first))[1].tokens == answer_to(first)
        control, shard = int(d.endpoint.rpartition(":")[2]), d.bulk.port
        await cluster.stop(d)
        # The old shard's port is somebody else's now.
        async with line_to("127.0.0.1:1", Line(f"127.0.0.1:{shard}")) as squatter:
            again = await cluster.decode(name="d", port=control)
            assert again.bulk.port != shard and again.instance.epoch > d.instance.epoch
            await until(lambda: p.machine.conversations.get(again.endpoint) is None)
            second = request_to(again, random_seed=2)
            assert (await cluster.run(p, again, second))[1].tokens == answer_to(second)
            assert squatter.connections == 0
        port = int(p.endpoint.rpartition(":")[2])
        await cluster.stop(p)
        replaced = await cluster.prefill(name="p", port=port)
        third = request_to(again, random_seed=3)
        assert (await cluster.run(replaced, again, third))[1].tokens == answer_to(third)
        (session,) = again.machine.ledger.sessions.live()
        assert session.owner.epoch == replaced.instance.epoch


async def test_the_first_request_after_connections_went_while_idle_is_answered() -> None:
    """F30: reset by something in between, forgotten by it without a word, or closed by us."""
    beats: dict[str, Any] = {"heartbeat_s": 1.0, "session_idle_s": 0.3}
    async with running() as cluster, silent_line() as to_p, silent_line() as to_d:
        p, d = await cluster.prefill(**beats), await cluster.decode(**beats)
        to_p.lead_to(p.endpoint)
        to_d.lead_to(d.endpoint)
        config = RouterConfig(
            engine="sim", heartbeat_s=1.0, prefill=(to_p.endpoint,), decode=(to_d.endpoint,)
        )
        router = await start_router(config, p.engine.tokenizer())
        try:
            await until(lambda: router.ready)
            async with rpc.aio_channel(router.endpoint, config, config) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                assert await _answered(stub, 5)
                await until(lambda: not p.machine.conversations.all())  # P's session was idle
                assert await _answered(stub, 6)
                await asyncio.gather(to_p.reset(), to_d.reset())
                # Each instance is found again at once, and not by the request that needs it.
                await until(lambda: not router.ready)
                await until(lambda: router.ready)
                assert await _answered(stub, 7)
                to_p.fall_silent()
                to_d.fall_silent()
                await until(lambda: not router.ready)
                to_p.speak()
                to_d.speak()
                await until(lambda: router.ready)
                assert await _answered(stub, 8)
        finally:
            await router.stop()


async def _answered(stub: inference_pb2_grpc.InferenceServiceStub, token: int) -> bool:
    """Whether a request is answered in full, without an error to its client."""
    return len((await ask(stub, request([token] * 20, GREEDY))).token_ids) == 4
