"""A D without file descriptors goes on with the connections it has, takes no new ones, and takes
them again when it has some: no restart is needed."""

from __future__ import annotations

import asyncio
import resource

import grpc.aio
import psutil
import pytest

from pd_grpc.client import AsyncClient
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import EngineConfig, Sizes, Timeouts
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, sampling_pb2
from tests.router.test_end_to_end import until_nothing_is_held
from tests.servers.processes import ready, server

SIM = ("--engine", "sim", "--sim-time-scale", "2", "--num-blocks", "64")
PROMPT = [5] * 30
NONE_MORE = 3
"""A limit below the descriptors that a process has: it keeps them, and gets no other."""

if not hasattr(psutil.Process, "rlimit"):
    pytest.skip("limits of another process cannot be set here", allow_module_level=True)


async def test_a_decode_without_descriptors_serves_whom_it_knows_and_then_everybody() -> None:
    with server("decode", *SIM) as process:
        endpoint = (await asyncio.to_thread(ready, process))[3]
        limits = psutil.Process(process.pid)
        usual = limits.rlimit(resource.RLIMIT_NOFILE)
        async with grpc.aio.insecure_channel(endpoint) as known:
            admin = admin_pb2_grpc.AdminServiceStub(known)
            await admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=10)
            limits.rlimit(resource.RLIMIT_NOFILE, (NONE_MORE, usual[1]))
            request = inference_pb2.GenerateRequest(
                token_ids=inference_pb2.TokenIds(ids=PROMPT),
                sampling=sampling_pb2.SamplingParams(
                    max_tokens=40, temperature=0.0, ignore_eos=True
                ),
            )
            stub = inference_pb2_grpc.InferenceServiceStub(known)
            tokens: list[int] = []
            async for message in stub.Generate(request, timeout=20):
                tokens += message.token_ids
            greedy = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
            assert tokens == sim_answer(PROMPT, greedy, EngineConfig(engine="sim"))
            async with rpc.aio_channel(endpoint, Timeouts(), Sizes()) as stranger:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await admin_pb2_grpc.AdminServiceStub(stranger).GetServerInfo(
                        admin_pb2.GetServerInfoRequest(), timeout=1.0
                    )
            late = grpc.StatusCode.DEADLINE_EXCEEDED
            assert raised.value.code() in (late, grpc.StatusCode.UNAVAILABLE)
            assert process.poll() is None
            limits.rlimit(resource.RLIMIT_NOFILE, usual)
            async with AsyncClient(endpoint) as client:
                answer = await client.generate(
                    token_ids=PROMPT, max_tokens=40, temperature=0, ignore_eos=True
                ).collect()
            assert answer.token_ids == tokens
            await asyncio.wait_for(until_nothing_is_held(endpoint), 5)
