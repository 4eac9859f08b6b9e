"""S4: what goes wrong with one request fails that one with its cause, and P goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pd_grpc.decode.server import start_decode
from pd_grpc.decode.service import Context, DecodeService
from pd_grpc.engine.base import DecodeSlot, EngineFault, PrefillChunk, Sampled
from pd_grpc.engine.sim import SimEngine
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import decode_pb2
from tests.prefill.cluster import SMALL, answer_to, request_to, running

POISON = 666
UNLUCKY = 13


class Poisoned(SimEngine):
    """Cannot compute a prompt that begins with one token."""

    def prefill(
        self, batch: Sequence[PrefillChunk], on_layer: Callable[[int, int], None]
    ) -> list[Sampled | None]:
        if any(chunk.token_ids[0] == POISON for chunk in batch):
            raise EngineFault("the prompt is poison")
        return super().prefill(batch, on_layer)


async def test_an_exception_fails_its_own_request_with_its_cause_and_no_other() -> None:
    async with running() as cluster:
        p, d = await cluster.prefill(engine=Poisoned), await cluster.decode()
        good = [request_to(d, tokens=10, random_seed=n) for n in range(6)]
        bad = request_to(d, tokens=10, random_seed=9)
        bad.tokens[0] = POISON
        outcomes = await asyncio.gather(
            *(cluster.run(p, d, request) for request in [*good[:3], bad, *good[3:]])
        )
        prefill, generate = outcomes.pop(3)
        for fault in (prefill.fault, generate.fault):
            assert isinstance(fault, Fault)
            assert (fault.reason, "poison" in fault.message) == (Reason.ENGINE_ERROR, True)
        assert [generate.tokens for _, generate in outcomes] == [answer_to(r) for r in good]
        await cluster.all_returned()
        again = request_to(d, random_seed=10)
        assert (await cluster.run(p, d, again))[1].tokens == answer_to(again)


class PoisonedDecode(SimEngine):
    """Cannot go on in a step that a request of one seed is in."""

    def decode(self, batch: Sequence[DecodeSlot]) -> list[Sampled]:
        if any(slot.sample.sampling.seed == POISON for slot in batch):
            raise EngineFault("the token is poison")
        return super().decode(batch)


async def test_an_exception_in_ds_step_fails_its_own_request_with_its_cause_and_no_other() -> None:
    async with running() as cluster:
        p, d = await cluster.prefill(), await cluster.decode(engine=PoisonedDecode)
        asked = [
            request_to(d, tokens=10, max_tokens=40, random_seed=n, seed=n + 1, ignore_eos=True)
            for n in range(7)
        ]
        bad = request_to(d, tokens=10, max_tokens=40, random_seed=9, seed=POISON, ignore_eos=True)
        outcomes = await asyncio.gather(
            *(cluster.run(p, d, request) for request in [*asked[:3], bad, *asked[3:]])
        )
        _, generate = outcomes.pop(3)
        assert isinstance(generate.fault, Fault)
        assert generate.fault.reason is Reason.ENGINE_ERROR and "poison" in generate.fault.message
        assert [generate.tokens for _, generate in outcomes] == [answer_to(r) for r in asked]
        await cluster.all_returned()


class Stumbles(DecodeService):
    """Raises once D has granted blocks for a prompt of one length."""

    async def Allocate(
        self, request: decode_pb2.AllocateRequest, context: Context
    ) -> decode_pb2.AllocateResponse:
        answer = await super().Allocate(request, context)
        if request.prompt_tokens == UNLUCKY:
            raise ArithmeticError("the answer cannot be built")
        return answer


async def test_an_exception_under_allocate_fails_its_own_request_and_takes_no_block() -> None:
    async with running() as cluster:
        config = DecodeConfig.model_validate(SMALL)
        d = await start_decode(config, SimEngine(config), decode_service=Stumbles)
        cluster.decodes.append(d)
        cluster.pools.append(d.pool)
        p = await cluster.prefill()
        good = [request_to(d, tokens=10, random_seed=n) for n in range(6)]
        bad = request_to(d, tokens=UNLUCKY)
        outcomes = await asyncio.wait_for(
            asyncio.gather(*(cluster.run(p, d, r) for r in [*good[:3], bad, *good[3:]])), 10
        )
        for outcome in outcomes.pop(3):
            assert outcome.fault is not None
        assert [generate.tokens for _, generate in outcomes] == [answer_to(r) for r in good]
        await cluster.all_returned()
        assert p.machine.placement.pool.lanes(0.0) == []


async def test_one_that_no_d_can_take_fails_while_others_are_prepared() -> None:
    async with running() as cluster:
        p, d = await cluster.prefill(), await cluster.decode(num_blocks=16)
        good = [request_to(d, tokens=10, random_seed=n) for n in range(4)]
        large = request_to(d, tokens=100)
        outcomes = await asyncio.gather(*(cluster.run(p, d, r) for r in [large, *good]))
        prefill, _ = outcomes.pop(0)
        assert isinstance(prefill.fault, Fault) and prefill.fault.reason is Reason.TOO_LARGE
        assert [generate.tokens for _, generate in outcomes] == [answer_to(r) for r in good]
