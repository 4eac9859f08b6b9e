"""F28, F29: pools that are too small for what was admitted. Nobody holds what another waits for, D
preempts its youngest and prefills it again itself, and every answer is what it would have been."""

from __future__ import annotations

import asyncio

from pd_grpc.decode.server import DecodeServer
from pd_grpc.decode.states import DecodeState
from tests.prefill.cluster import Request, answer_to, request_to, running

LIMIT_S = 25.0


def _requests(ds: list[DecodeServer], number: int, tokens: int, max_tokens: int) -> list[Request]:
    """To the Ds in turn, greedy and seeded in turn; they never end before max_tokens."""
    return [
        request_to(
            ds[n // 2 % len(ds)],
            tokens=tokens,
            max_tokens=max_tokens,
            seed=n if n % 2 else None,
            random_seed=n,
            ignore_eos=True,
        )
        for n in range(number)
    ]


def _preemptions(d: DecodeServer) -> list[str]:
    """Grows by the id of each transfer that is preempted, whenever it is."""
    seen: list[str] = []
    d.runtime.listeners.append(
        lambda change: (
            seen.append(change.key.transfer_id) if change.after is DecodeState.PREEMPTED else None
        )
    )
    return seen


async def test_outputs_that_outgrow_the_pool_are_all_completed_and_right() -> None:
    """F29: twelve requests of 20 blocks each in the end, in a pool of 64; all are admitted with
    what their prompts need."""
    async with running() as cluster:
        p, d = await cluster.prefill(), await cluster.decode(num_blocks=64)
        preempted = _preemptions(d)
        requests = _requests([d], 12, tokens=18, max_tokens=60)
        legs = [cluster.run(p, d, each, LIMIT_S) for each in requests]
        outcomes = await asyncio.gather(*legs)
        for request, (prefill, generate) in zip(requests, outcomes, strict=True):
            assert (prefill.fault, generate.fault) == (None, None)
            assert generate.tokens == answer_to(request)
        assert len(set(preempted)) > 1, "the pool was large enough for all, which shows nothing"


async def test_what_is_preempted_is_not_starved_by_those_that_wait_for_blocks() -> None:
    """F29: a queue of new requests stands behind it all the while."""
    async with running() as cluster:
        p, d = await cluster.prefill(), await cluster.decode(num_blocks=40)
        preempted = _preemptions(d)
        requests = _requests([d], 4, tokens=18, max_tokens=60)
        requests += _requests([d], 24, tokens=30, max_tokens=8)
        legs = [cluster.run(p, d, each, LIMIT_S) for each in requests]
        outcomes = await asyncio.gather(*legs)
        assert [generate.tokens for _, generate in outcomes] == [answer_to(r) for r in requests]
        assert preempted, "the pool was large enough for all, which shows nothing"


async def test_small_pools_on_both_sides_never_wait_for_each_other() -> None:
    """F28: two Ps and two Ds, each with room for little more than one request at a time."""
    async with running() as cluster:
        ps = [await cluster.prefill(num_blocks=14) for _ in range(2)]
        ds = [await cluster.decode(num_blocks=16) for _ in range(2)]
        requests = _requests(ds, 24, tokens=40, max_tokens=12)

        async def run(n: int) -> None:
            prefill, generate = await cluster.run(
                ps[n % 3 % 2], ds[n // 2 % 2], requests[n], LIMIT_S
            )
            assert (prefill.fault, generate.fault) == (None, None)
            assert generate.tokens == answer_to(requests[n])

        await asyncio.gather(*(run(n) for n in range(len(requests))))
