"""What it costs P to have many requests in preparation: memory, threads, chunks for nobody."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio
import psutil
import pytest

from pd_grpc.engine.base import PrefillChunk, Sampled
from pd_grpc.engine.sim import SimEngine
from pd_grpc.v1 import prefill_pb2_grpc
from tests.prefill.cluster import request_to, running
from tests.servers.processes import SIM, ready, server
from tests.waiting import until

IN_PREPARATION = 256
MOST_BYTES = 64 << 10
MOST_THREADS = 12
# Tracing memory makes every side slow; no lease is to end meanwhile.
PATIENT: dict[str, Any] = {"heartbeat_s": 20.0, "lease_s": 60.0}
PROMPT = 64
PER_TOKEN = 48
"""Bytes that Python's own number and its place in a tuple take, generously."""


@pytest.mark.timeout(180)
async def test_a_prepared_request_takes_at_most_64_kib_beyond_its_tokens() -> None:
    """Measured on all sides at once, caller, P and D, so that P's part is less."""
    async with running() as cluster:
        d = await cluster.decode(num_blocks=8192, **PATIENT)
        p = await cluster.prefill(prepare_window=IN_PREPARATION, prepare_ahead=IN_PREPARATION)
        held = p.pool.reserve(p.pool.free, owner="the test")
        pool = p.machine.placement.pool
        requests = [request_to(d, tokens=PROMPT, random_seed=n) for n in range(IN_PREPARATION + 1)]
        warm = asyncio.create_task(cluster.run_prefill(p, requests[0], 120))
        await until(lambda: pool.granted == 1)
        gc.collect()
        tracemalloc.start()
        legs = [asyncio.create_task(cluster.run_prefill(p, r, 120)) for r in requests[1:]]
        # One more where D granted the last two at once.
        await until(lambda: pool.granted >= IN_PREPARATION, 90)
        gc.collect()
        bytes_now, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert bytes_now / (pool.granted - 1) < MOST_BYTES + PROMPT * PER_TOKEN
        for leg in [warm, *legs]:
            leg.cancel()
        await asyncio.gather(warm, *legs, return_exceptions=True)
        held.release()
        p.runtime.wake()


@pytest.mark.timeout(180)
async def test_threads_do_not_grow_with_what_is_in_preparation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Those of numpy's linear algebra, as many as there are cores, have nothing to do with it.
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    async with running() as cluster:
        d = await cluster.decode(**PATIENT)
        taken = d.pool.reserve(d.pool.free, owner="the test")
        # No D has more in flight than the total has left.
        total = ("--prepare-total", str(2 * IN_PREPARATION))
        with server("prefill", *SIM, "--prepare-window", str(IN_PREPARATION), *total) as running_p:
            endpoint = ready(running_p)[3]
            p = psutil.Process(running_p.pid)
            stub = prefill_pb2_grpc.PrefillServiceStub(cluster.channel(endpoint))
            calls: list[grpc.aio.Call] = []
            threads = []
            for many in (1, IN_PREPARATION):
                while len(calls) < many:
                    request = request_to(d, tokens=4, random_seed=len(calls))
                    calls.append(stub.Prefill(request.prefill(), timeout=120))
                await until(lambda n=many: len(d.view.transfers()) == n, 90)  # type: ignore[misc]
                threads.append(p.num_threads())
            assert max(threads) <= MOST_THREADS, threads
            for call in calls:
                call.cancel()
            # Each Allocate has left D's queue, and none of them had blocks.
            await until(lambda: not d.view.transfers(), 30)
        taken.release()


class Counted(SimEngine):
    """Counts the chunks that it is given."""

    chunks = 0

    def prefill(
        self, batch: Sequence[PrefillChunk], on_layer: Callable[[int, int], None]
    ) -> list[Sampled | None]:
        self.chunks += len(batch)
        return super().prefill(batch, on_layer)


async def test_a_cancel_wastes_at_most_one_chunk() -> None:
    async with running() as cluster:
        # 40 chunks of 16 tokens, each of which takes a while.
        p = await cluster.prefill(engine=Counted, sim_time_scale=20.0)
        d = await cluster.decode()
        engine = p.engine
        assert isinstance(engine, Counted)
        stub = prefill_pb2_grpc.PrefillServiceStub(cluster.channel(p.endpoint))
        call = stub.Prefill(request_to(d, tokens=640).prefill(), timeout=60)
        async for message in call:
            if message.HasField("progress"):
                break
        call.cancel()
        await until(lambda: not p.view.transfers())
        begun = engine.chunks
        await until(lambda: p.pool.free == p.pool.total)
        ended = engine.chunks
        assert ended <= begun + 1, "the chunk that was on its way to the engine"
        other = request_to(d, tokens=16)
        await cluster.run(p, d, other)
        assert engine.chunks == ended + 1, "one for the other request, and no more of the first"
        assert begun < 40
