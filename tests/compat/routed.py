"""One request through a real router, with a middleman before P and one before D."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from pd_grpc.conformance.sampling_values import FEATURES
from pd_grpc.engine.sim import SimEngine
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import EngineConfig, RouterConfig
from pd_grpc.protocol.faults import Fault, TransportFault
from pd_grpc.protocol.messages import sampling_from_proto
from pd_grpc.router.server import RouterServer, start_router
from pd_grpc.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2, types_pb2
from tests.compat.middleman import Edit, between
from tests.compat.scenes import HalfSure
from tests.prefill.cluster import SMALL, Cluster, running

READ = ("PrefillService", "InferenceService")
WAYS = (*READ, "DecodeService", "AdminService", "Health")
PATIENCE_S = 5.0
READY_S = 1.5
"""How long the router may take to find its instances; without them it says that there are none."""


@dataclass
class Answer:
    """What the client of the router was told."""

    request: inference_pb2.GenerateRequest
    fault: Fault | TransportFault | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: int = 0
    last: inference_pb2.GenerateResponse = field(default_factory=inference_pb2.GenerateResponse)

    def meant(self, without: str = "") -> list[int]:
        """The tokens that sim must say, `without` a field of the sampling."""
        sampling = sampling_pb2.SamplingParams()
        sampling.CopyFrom(self.request.sampling)
        if without:
            sampling.ClearField(without)
        config = EngineConfig.model_validate({"engine": "sim", "block_size": SMALL["block_size"]})
        prompt, generated = self.request.token_ids.ids, self.request.generated_token_ids
        return sim_answer(list(prompt), sampling_from_proto(sampling), config, list(generated))

    @property
    def whole(self) -> bool:
        """Whether everything beside the tokens is there and fits them."""
        prompt = len(self.request.token_ids.ids)
        said = len(self.request.generated_token_ids) + len(self.tokens)
        usage = self.last.usage
        asked = self.request.sampling.HasField("logprobs")
        served_by = (self.last.prefill_instance, self.last.decode_instance)
        return (
            self.last.finish_reason == types_pb2.FINISH_REASON_LENGTH
            and (usage.prompt_tokens, usage.completion_tokens) == (prompt, said)
            and self.logprobs == (len(self.tokens) if asked else 0)
            and bool(self.text)
            and served_by == ("p", "d")
        )


@contextlib.asynccontextmanager
async def site(
    edit: Edit, engine: type[SimEngine] = SimEngine
) -> AsyncIterator[tuple[Cluster, RouterServer]]:
    """A router that reaches P and D through middlemen who edit what it and they say."""
    async with running() as cluster:
        p = await cluster.prefill(name="p", engine=engine)
        # Where D prefills for itself, P's part waits for a client in vain.
        d = await cluster.decode(name="d", engine=engine, attach_s=0.5)
        async with (
            between(dict.fromkeys(WAYS, p.endpoint), READ) as before_p,
            between(dict.fromkeys(WAYS, d.endpoint), READ) as before_d,
        ):
            before_p.edit = before_d.edit = edit
            config = RouterConfig(
                engine="sim",
                prefill=(before_p.endpoint,),
                decode=(before_d.endpoint,),
                grace_s=0.5,
                settle_s=0.2,
            )
            router = await start_router(config, d.engine.tokenizer())
            try:
                yield cluster, router
                await cluster.all_returned()
            finally:
                await router.stop(0.0)


async def _until_ready(router: RouterServer) -> None:
    while not router.ready:
        await router.discovery.changed()


async def ask(
    edit: Edit,
    engine: type[SimEngine] = SimEngine,
    generated: tuple[int, ...] = (),
    salt: bytes = b"",
    **options: Any,
) -> Answer:
    """A request of a client that names everything it may."""
    sampling = sampling_pb2.SamplingParams(**{"max_tokens": 8, "seed": 3, **options})
    request = inference_pb2.GenerateRequest(
        request_id="r-1",
        token_ids=inference_pb2.TokenIds(ids=range(100, 150)),
        sampling=sampling,
        generated_token_ids=generated,
        scope=sampling_pb2.RequestScope(cache_salt=salt) if salt else None,
    )
    answer = Answer(request)
    async with site(edit, engine) as (cluster, router):
        with contextlib.suppress(asyncio.TimeoutError):  # Then it will say so.
            await asyncio.wait_for(_until_ready(router), READY_S)
        stub = inference_pb2_grpc.InferenceServiceStub(cluster.channel(router.endpoint))
        try:
            async for said in stub.Generate(request, timeout=PATIENCE_S):
                answer.tokens += said.token_ids
                answer.text += said.text
                answer.logprobs += len(said.logprobs)
                answer.last = said
        except grpc.aio.AioRpcError as error:
            answer.fault = rpc.read_error(error)
    return answer


async def plain(edit: Edit) -> Answer:
    """A request as most are."""
    return await ask(edit)


async def sampled(edit: Edit) -> Answer:
    """Every sampling field that is built has a value of its own."""
    return await ask(
        edit,
        temperature=0.9,
        top_p=0.9,
        top_k=40,
        min_tokens=2,
        stop=["never said"],
        stop_token_ids=[5],
        ignore_eos=True,
    )


async def with_logprobs(edit: Edit) -> Answer:
    """The client asks for log-probabilities."""
    return await ask(edit, HalfSure, logprobs=2)


async def with_features(edit: Edit) -> Answer:
    """Every sampling field that needs a feature has a value of its own."""
    return await ask(edit, HalfSure, **{**FEATURES, "logprobs": 2})


async def continued(edit: Edit) -> Answer:
    """The client has the beginning of the answer already."""
    return await ask(edit, generated=(7, 8))


async def salted(edit: Edit) -> Answer:
    """The client shares what is computed for it with nobody else."""
    return await ask(edit, salt=b"salt")


Asking = Callable[[Edit], Awaitable[Answer]]
