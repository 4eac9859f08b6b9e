"""Killed servers that no client hears of: two Ps, two Ds and a router as processes, on sim."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
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
        self, client: AsyncClient, prompt: list[int], sampling: Sampling, n: int = 1
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
        )
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for piece in self._generation:
            self.choices[piece.choice].add(piece)

    @property
    def begun(self) -> bool:
        """Whether every choice has a token."""
        return all(answer.token_ids for answer in self.choices)

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


@contextlib.asynccontextmanager
async def attempts_of(router: str) -> AsyncIterator[dict[str, int]]:
    """The last attempt of each transfer that ends meanwhile."""
    ended: dict[str, int] = {}
    async with grpc.aio.insecure_channel(router) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        changes = admin.WatchTransfers(admin_pb2.WatchTransfersRequest(), timeout=60)
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
            answers = [Streaming(client, [7 + n] * (20 + n), sampling(n, 90)) for n in range(6)]
            answers += [Streaming(client, [5] * 40, sampling(n, 90), n=3) for n in (1, 3)]
            await until(lambda: all(each.begun for each in answers))
            assert not any(each.reading.done() for each in answers)
            os.kill(running.processes["decode-0"], signal.SIGKILL)
            async with until_computing(endpoints["prefill-0"]):
                answers += [Streaming(client, [9 + n] * 600, sampling(n, 30)) for n in range(4)]
                answers += [Streaming(client, [6] * 600, sampling(n, 30), n=3) for n in (1, 3)]
            os.kill(running.processes["prefill-0"], signal.SIGKILL)
            await asyncio.wait_for(asyncio.gather(*(each.reading for each in answers)), 30)
            await until(lambda: len(attempts) == sum(len(each.choices) for each in answers))
        for each in answers:
            each.check()
        assert max(attempts.values()) > 1, attempts
        for survivor in ("prefill-1", "decode-1"):
            await asyncio.wait_for(until_nothing_is_held(endpoints[survivor]), LIMIT_S)
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)
