"""F56: KV of one salt, adapter or image never serves another request.

Adapters and images are not built: a request that names one is refused by name. A salt is a part of
the name of every block, so that equal tokens of another salt never meet."""

from __future__ import annotations

from typing import Any

import grpc.aio

from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import inference_pb2_grpc, prefill_pb2, prefill_pb2_grpc, sampling_pb2
from tests.cluster import SIM, cluster
from tests.decode.wire import fault_of, wire
from tests.prefill.cluster import request_to
from tests.system.asking import ask, request

PROMPT = list(range(40, 104))
SAMPLING = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
SCOPES: dict[str, Any] = {
    "adapter": "lora-7",
    "media_hashes": [b"h" * 32],
    "tenant": "another",
    "model": "another",
}


def _is_refusal(fault: Fault, name: str) -> None:
    assert (fault.code, fault.reason) == (Code.UNIMPLEMENTED, Reason.FEATURE)
    assert fault.metadata["feature"] == f"scope.{name}"


async def test_equal_tokens_in_another_scope_are_refused_by_every_server() -> None:
    """F56: after the same tokens were answered, and would be hit."""
    async with cluster() as servers, servers.client() as router:
        p, d = servers.prefills[0], servers.decodes[0]
        answered = await ask(router, request(PROMPT, SAMPLING))
        async with (
            grpc.aio.insecure_channel(d.endpoint) as to_d,
            grpc.aio.insecure_channel(p.endpoint) as to_p,
        ):
            decode = inference_pb2_grpc.InferenceServiceStub(to_d)
            prefill = prefill_pb2_grpc.PrefillServiceStub(to_p)
            for name, value in SCOPES.items():
                scope = sampling_pb2.RequestScope(**{name: value})
                message = request(PROMPT, SAMPLING)
                message.scope.CopyFrom(scope)
                leg: prefill_pb2.PrefillRequest = request_to(d).prefill()
                leg.scope.CopyFrom(scope)
                for call in (
                    router.Generate(message, timeout=60),
                    decode.Generate(message, timeout=60),
                    prefill.Prefill(leg, timeout=60),
                ):
                    _is_refusal(await fault_of(call), name)
        again = await ask(router, request(PROMPT, SAMPLING))
        assert again.essence == answered.essence
        assert again.last.usage.cached_tokens > 0


async def test_equal_tokens_of_another_salt_meet_no_kv_of_before() -> None:
    """F56: on neither instance; the first salt's own are still there afterwards."""
    async with cluster() as servers, servers.client() as router:
        spared = []
        for salt in (b"one tenant", b"another", b"", b"one tenant"):
            message = request(PROMPT, SAMPLING)
            message.scope.cache_salt = salt
            reply = await ask(router, message)
            assert reply.token_ids == sim_answer(PROMPT, SAMPLING, DecodeConfig(**SIM))
            spared.append(reply.last.usage.cached_tokens)
        assert spared[:3] == [0, 0, 0] and spared[3] > 0


async def test_an_allocate_in_another_scope_costs_no_block() -> None:
    """F56: whatever P forgot to refuse."""
    async with wire() as d:
        p = await d.prefill()
        for name, value in SCOPES.items():
            scope = sampling_pb2.RequestScope(**{name: value})
            _is_refusal(await fault_of(p.allocate(d.request(), scope=scope)), name)
            assert d.server.pool.free == d.server.pool.total
