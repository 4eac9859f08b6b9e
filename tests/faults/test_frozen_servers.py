"""A D or a router that freezes, with its sockets open, is found within two heartbeats by everybody
who talks to it; what it held elsewhere is freed, and it serves again when it wakes up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator

import grpc.aio

from pd_grpc.cli.cluster import ClusterPlan, LocalCluster
from pd_grpc.client import AsyncClient, AsyncGeneration, Fault
from pd_grpc.protocol.faults import Reason
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc
from tests.router.test_end_to_end import until_computing, until_nothing_is_held
from tests.waiting import LIMIT_S

HEARTBEAT_S = 1.0
LATE_S = 20.0
"""For a machine that is busy: less than any other time that would end what waits."""
FLAGS = (
    *("--sim-time-scale", "10", "--chunk-tokens", "64", "--max-model-len", "4096"),
    *("--heartbeat-s", str(HEARTBEAT_S), "--grace-s", "0.3"),
)
PLAN = ClusterPlan(
    engine="sim", flags=FLAGS, router_flags=("--heartbeat-s", str(HEARTBEAT_S), "--no-retry")
)


def _ask(client: AsyncClient, prompt: int, max_tokens: int) -> AsyncGeneration:
    return client.generate(
        token_ids=[5] * prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True
    )


@contextlib.contextmanager
def _frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def _serves(endpoint: str) -> None:
    """It is asked again until it has found its instances."""
    async with AsyncClient(endpoint) as client:
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                answer = await _ask(client, 30, 4).collect()
            except Fault as fault:
                assert fault.reason is Reason.NO_INSTANCE and time.monotonic() < deadline
            else:
                assert len(answer.token_ids) == 4
                return


async def test_a_frozen_decode_and_a_frozen_router_hold_nobody() -> None:
    running = await asyncio.to_thread(LocalCluster(PLAN).__enter__)
    try:
        ends = {instance.name: instance.endpoint for instance in running.instances}
        pids = running.processes
        async with AsyncClient(running.router_endpoint) as client:
            async with until_computing(ends["prefill-0"]):
                generation = _ask(client, 2000, 500)
            reading = asyncio.create_task(generation.collect())
            with _frozen(pids["decode-0"]):
                began = time.monotonic()
                (failed,) = await asyncio.gather(reading, return_exceptions=True)
                assert isinstance(failed, Fault) and failed.reason is Reason.DECODE_LOST, failed
                assert time.monotonic() - began < 2 * HEARTBEAT_S + LATE_S
                await asyncio.wait_for(until_nothing_is_held(ends["prefill-0"]), LIMIT_S)
            await asyncio.wait_for(until_nothing_is_held(ends["decode-0"]), LIMIT_S)
            await _serves(running.router_endpoint)

            # The router next, while D generates for one client and P computes for another.
            streaming = _ask(client, 20, 1000)
            await anext(streaming)
            async with until_computing(ends["prefill-0"]):
                computing = _ask(client, 2000, 500)
            legs = [asyncio.create_task(each.collect()) for each in (streaming, computing)]
            with _frozen(pids["router"]):
                freed = (until_nothing_is_held(ends[name]) for name in ("prefill-0", "decode-0"))
                await asyncio.wait_for(asyncio.gather(*freed), 2 * HEARTBEAT_S + LATE_S)
            await asyncio.gather(*legs, return_exceptions=True)
            await _serves(running.router_endpoint)
            async with grpc.aio.insecure_channel(running.router_endpoint) as channel:
                admin = admin_pb2_grpc.AdminServiceStub(channel)
                listed = await admin.ListTransfers(admin_pb2.ListTransfersRequest(), timeout=60)
                assert list(listed.transfers) == []
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)
