"""A process without file descriptors goes on with the connections it has, makes and takes no new
ones, and does so again when it has some, without a restart. Shown of D, of P and of the router."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import AsyncIterator, Iterator

import grpc.aio
import psutil
import pytest

from pd_grpc.cli.cluster import ClusterPlan, LocalCluster
from pd_grpc.client import Answer, AsyncClient, AsyncGeneration
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import EngineConfig, Sizes, Timeouts
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc
from tests.router.test_end_to_end import until_nothing_is_held
from tests.servers.processes import ready, server
from tests.waiting import LIMIT_S

PLAN = ClusterPlan(engine="sim", decode=2, flags=("--sim-time-scale", "2", "--num-blocks", "64"))
PROMPT = [5] * 30
NONE_MORE = 3
"""A limit below the descriptors that a process has: it keeps them, and gets no other."""

if not hasattr(psutil.Process, "rlimit"):
    pytest.skip("limits of another process cannot be set here", allow_module_level=True)


@contextlib.contextmanager
def no_descriptors(pid: int) -> Iterator[None]:
    """A process that gets none meanwhile."""
    process = psutil.Process(pid)
    usual = process.rlimit(resource.RLIMIT_NOFILE)
    process.rlimit(resource.RLIMIT_NOFILE, (NONE_MORE, usual[1]))
    try:
        yield
        assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.rlimit(resource.RLIMIT_NOFILE, usual)


@contextlib.asynccontextmanager
async def started() -> AsyncIterator[tuple[LocalCluster, dict[str, str]]]:
    """A router, a P and two Ds as processes, and their endpoints by name."""
    running = await asyncio.to_thread(LocalCluster(PLAN).__enter__)
    try:
        yield running, {instance.name: instance.endpoint for instance in running.instances}
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)


def ask(client: AsyncClient, max_tokens: int = 40) -> AsyncGeneration:
    return client.generate(
        token_ids=PROMPT, max_tokens=max_tokens, temperature=0, ignore_eos=True, timeout_s=20
    )


def check(answer: Answer) -> str:
    """It is the right one; returns the D that gave it."""
    assert answer.end is not None
    greedy = Sampling(max_tokens=len(answer.token_ids), temperature=0.0, ignore_eos=True)
    assert answer.token_ids == sim_answer(PROMPT, greedy, EngineConfig(engine="sim"))
    return answer.end.decode_instance


async def takes_no_stranger(endpoint: str) -> None:
    async with rpc.aio_channel(endpoint, Timeouts(), Sizes()) as stranger:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await admin_pb2_grpc.AdminServiceStub(stranger).GetServerInfo(
                admin_pb2.GetServerInfoRequest(), timeout=1.0
            )
    late = grpc.StatusCode.DEADLINE_EXCEEDED
    assert raised.value.code() in (late, grpc.StatusCode.UNAVAILABLE)


async def takes_strangers(endpoint: str) -> None:
    async with AsyncClient(endpoint) as client:
        check(await ask(client).collect())


async def until_both_answer(client: AsyncClient) -> None:
    """Ask until either D has given an answer."""
    both: set[str] = set()
    while len(both) < 2:
        answers = await asyncio.gather(*(ask(client).collect() for _ in range(4)))
        both |= {check(answer) for answer in answers}


async def test_a_decode_without_descriptors_serves_whom_it_knows_and_then_everybody() -> None:
    async with started() as (running, endpoints):
        endpoint = endpoints["decode-0"]
        async with AsyncClient(endpoint) as known:
            check(await ask(known).collect())
            with no_descriptors(running.processes["decode-0"]):
                check(await ask(known).collect())
                await takes_no_stranger(endpoint)
        await takes_strangers(endpoint)
        for name in ("prefill-0", "decode-0", "decode-1"):
            await asyncio.wait_for(until_nothing_is_held(endpoints[name]), LIMIT_S)


async def test_a_prefill_without_descriptors_turns_to_the_decode_it_knows_and_then_to_any() -> None:
    async with started() as (running, endpoints), AsyncClient(endpoints["router"]) as client:
        known = check(await ask(client).collect())
        with no_descriptors(running.processes["prefill-0"]):
            answers = await asyncio.gather(*(ask(client).collect() for _ in range(6)))
            assert {check(answer) for answer in answers} == {known}
            await takes_no_stranger(endpoints["prefill-0"])
        await asyncio.wait_for(until_both_answer(client), LIMIT_S)
        for name in ("prefill-0", "decode-0", "decode-1"):
            await asyncio.wait_for(until_nothing_is_held(endpoints[name]), LIMIT_S)


async def test_a_router_without_descriptors_goes_on_with_the_instances_it_is_connected_to() -> None:
    """One of them dies then, and the one that takes its place is found later."""
    async with started() as (running, endpoints), AsyncClient(endpoints["router"]) as client:
        await until_both_answer(client)
        port = endpoints["decode-0"].rpartition(":")[2]
        again = ("--name", "decode-0", "--port", port, *PLAN.engine_flags())
        with contextlib.ExitStack() as successor:
            with no_descriptors(running.processes["router"]):
                streams = [ask(client, max_tokens=200) for _ in range(4)]
                begun = [await anext(stream) for stream in streams]
                os.kill(running.processes["decode-0"], signal.SIGKILL)
                rests = await asyncio.gather(*(stream.collect() for stream in streams))
                for first, rest in zip(begun, rests, strict=True):
                    rest.token_ids[:0] = first.token_ids
                    assert check(rest) == "decode-1" and len(rest.token_ids) == 200
                await takes_no_stranger(endpoints["router"])
                decode = successor.enter_context(server("decode", *again))
                await asyncio.to_thread(ready, decode)
                assert check(await ask(client).collect()) == "decode-1"
            await asyncio.wait_for(until_both_answer(client), LIMIT_S)
        await asyncio.wait_for(until_nothing_is_held(endpoints["decode-1"]), LIMIT_S)
