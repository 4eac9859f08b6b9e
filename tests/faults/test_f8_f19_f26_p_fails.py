"""F8, F19, F26: what goes wrong at P is told to D's client in one round trip, with its cause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from pd_grpc.engine.base import EngineFault
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.engine.sim import SimEngine
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import EngineConfig, RouterConfig
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import inference_pb2_grpc
from tests.cluster import cluster
from tests.prefill.cluster import Outcome, answer_to, request_to, running
from tests.system.asking import ask, request
from tests.waiting import LIMIT_S

AT_ONCE_S = 15.0
"""On however slow a machine: every timer that could end a request here is far longer."""
PATIENT: dict[str, Any] = {"heartbeat_s": 60.0, "lease_s": 240.0, "kv_progress_s": 90.0}
"""No timer can be what ends a request here."""


class Unreadable(HostKvMemory):
    """Cannot be read while it is told so."""

    broken = False

    def read(
        self,
        blocks: Sequence[int],
        group: int,
        layer: int,
        layers: int,
        heads: tuple[int, int] | None = None,
    ) -> list[memoryview]:
        if self.broken:
            raise OSError("the memory of the engine is gone")
        return super().read(blocks, group, layer, layers, heads)


class Forgetful(SimEngine):
    """Computes well, but its KV cannot be read to be sent."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.memory = Unreadable(
            bytearray(self.memory.num_blocks * self.layout.block_bytes), self.layout
        )


class Failing(SimEngine):
    """Computes nothing."""

    def prefill(self, *arguments: Any) -> Any:
        raise EngineFault("no prompt is good enough")


def _failed(outcome: Outcome, words: str) -> None:
    assert isinstance(outcome.fault, Fault), outcome.fault
    assert (outcome.fault.code, outcome.fault.reason) == (Code.INTERNAL, Reason.ENGINE_ERROR)
    assert words in outcome.fault.message


async def test_kv_that_p_cannot_send_ends_the_wait_of_d_at_once() -> None:
    """F8"""
    async with running() as servers:
        p = await servers.prefill(engine=Forgetful, **PATIENT)
        d = await servers.decode(**PATIENT)
        assert isinstance(p.engine.memory, Unreadable)
        p.engine.memory.broken = True
        asked = time.monotonic()
        for outcome in await servers.run(p, d, request_to(d)):
            _failed(outcome, "KV could not be sent")
        assert time.monotonic() - asked < AT_ONCE_S
        await servers.all_returned(AT_ONCE_S)


async def test_ds_client_hears_why_p_failed_in_one_round_trip() -> None:
    """F19"""
    async with running() as servers:
        p, d = await servers.prefill(engine=Failing, **PATIENT), await servers.decode(**PATIENT)
        asked = time.monotonic()
        for outcome in await servers.run(p, d, request_to(d)):
            _failed(outcome, "good enough")
        assert time.monotonic() - asked < AT_ONCE_S
        other = await servers.prefill(**PATIENT)
        again = request_to(d, random_seed=2)
        assert (await servers.run(other, d, again))[1].tokens == answer_to(again)


async def test_an_input_that_p_cannot_take_is_the_clients_error_and_frees_d() -> None:
    """F26"""
    async with (
        cluster(prefill_settings={"num_blocks": 8}) as servers,
        rpc.aio_channel(servers.router.endpoint, RouterConfig(), RouterConfig()) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        greedy = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
        asked = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await ask(stub, request([5] * 200, greedy))
        assert time.monotonic() - asked < AT_ONCE_S
        fault = rpc.read_error(raised.value)
        assert isinstance(fault, Fault)
        assert (fault.code, fault.reason) == (Code.INVALID_ARGUMENT, Reason.TOO_LARGE)
        await servers.settled()
        fits = await asyncio.wait_for(ask(stub, request([5] * 20, greedy)), LIMIT_S)
        assert len(fits.token_ids) == 4
