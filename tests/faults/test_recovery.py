"""Killed servers that no client hears of: two Ps, two Ds and a router as processes, on sim."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

import grpc.aio

from pd_grpc.cli.cluster import ClusterPlan, LocalCluster
from pd_grpc.client import Answer, AsyncClient
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.engine.text import Detokenizer
from pd_grpc.protocol.choices import choice_seed
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc, types_pb2
from tests.faults.freezing import kill_amid_answers, killed_with_work
from tests.router.test_end_to_end import until_computing, until_nothing_is_held
from tests.waiting import LIMIT_S, until

VOCAB = 300
"""Most tokens are single bytes, so that any seam is in the middle of something."""
FLAGS = ("--sim-time-scale", "10", "--chunk-tokens", "64", "--sim-vocab", str(VOCAB))
PLAN = ClusterPlan(
    prefill=2, decode=2, engine="sim", flags=FLAGS, router_flags=("--sim-vocab", str(VOCAB))
)


def sampling(n: int, max_tokens: int) -> Sampling:
    """Greedy and seeded in turn."""
    return Sampling(max_tokens=max_tokens, temperature=n % 2, seed=n, ignore_eos=True)


class Streaming:
    """One request as its client has it so far."""

    def __init__(
        self,
        client: AsyncClient,
        prompt: list[int],
        sampling: Sampling,
        n: int = 1,
        name: str = "",
    ) -> None:
        self.prompt, self.sampling = prompt, sampling
        self.choices = [Answer() for _ in range(n)]
        self._generation = client.generate(
            token_ids=prompt,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            ignore_eos=True,
            n=n,
            request_id=name,
        )
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for piece in self._generation:
            self.choices[piece.choice].add(piece)

    def check(self) -> None:
        """Everything is as if nobody had died."""
        for choice, answer in enumerate(self.choices):
            sampling = replace(self.sampling, seed=choice_seed(self.sampling.seed, choice))
            meant = sim_answer(self.prompt, sampling, EngineConfig(engine="sim", sim_vocab=VOCAB))
            assert answer.token_ids == meant
            whole = Detokenizer(SimTokenizer(VOCAB))
            assert answer.text == whole.push(meant) + whole.finish()
            assert answer.end is not None
            counted = answer.end.prompt_tokens, answer.end.completion_tokens
            assert counted == (len(self.prompt), len(meant))


def are_under_way(tokens: Mapping[str, int]) -> bool:
    """Whether an answer to one of the first requests has begun and has far to go."""
    return any(0 < tokens.get(f"s{n}", 0) < 70 for n in range(6))


@contextlib.asynccontextmanager
async def attempts_of(router: str) -> AsyncIterator[dict[str, int]]:
    """The last attempt of each transfer that ends meanwhile."""
    ended: dict[str, int] = {}
    async with grpc.aio.insecure_channel(router) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        changes = admin.WatchTransfers(admin_pb2.WatchTransfersRequest(), timeout=180)
        await changes.initial_metadata()

        async def read() -> None:
            async for change in changes:
                if change.transfer.state == types_pb2.TRANSFER_STATE_FINISHED:
                    ended[change.transfer.ref.transfer_id] = change.transfer.ref.attempt

        reading = asyncio.create_task(read())
        try:
            yield ended
        finally:
            changes.cancel()
            await asyncio.wait({reading})


async def test_no_client_hears_of_a_prefill_and_a_decode_that_are_killed() -> None:
    running = await asyncio.to_thread(LocalCluster(PLAN).__enter__)
    try:
        endpoints = {instance.name: instance.endpoint for instance in running.instances}
        async with (
            AsyncClient(running.router_endpoint) as client,
            attempts_of(running.router_endpoint) as attempts,
        ):
            answers = [
                Streaming(client, [7 + n] * (20 + n), sampling(n, 90), name=f"s{n}")
                for n in range(6)
            ]
            answers += [Streaming(client, [5] * 40, sampling(n, 90), n=3) for n in (1, 3)]
            # P passes over a D that it has not met yet, so that either may have them all.
            ds = {name: running.processes[name] for name in ("decode-0", "decode-1")}
            amid = kill_amid_answers(running.router_endpoint, ds, are_under_way)
            ds.pop(await asyncio.wait_for(amid, LIMIT_S))
            async with until_computing(endpoints["prefill-0"]):
                answers += [Streaming(client, [9 + n] * 600, sampling(n, 30)) for n in range(4)]
            names = ["left-0", "left-1", "left-2"]
            prefill = "prefill-0", running.processes["prefill-0"]
            async with killed_with_work(running.router_endpoint, *prefill, names):
                answers += [
                    Streaming(client, [6] * 600, sampling(n, 30), n=n, name=name)
                    for n, name in enumerate(names, 1)
                ]
            await asyncio.wait_for(asyncio.gather(*(each.reading for each in answers)), LIMIT_S)
            await until(lambda: len(attempts) == sum(len(each.choices) for each in answers))
        for each in answers:
            each.check()
        assert max(attempts.values()) > 1, attempts
        for survivor in ("prefill-1", *ds):
            await asyncio.wait_for(until_nothing_is_held(endpoints[survivor]), LIMIT_S)
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)
