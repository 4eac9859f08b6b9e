"""Asking a cluster, and what came back."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from pd_grpc.protocol.messages import sampling_to_proto
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import inference_pb2, inference_pb2_grpc, types_pb2


@dataclass
class Reply:
    """A whole answer."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    last: inference_pb2.GenerateResponse = field(default_factory=inference_pb2.GenerateResponse)
    logprobs: list[types_pb2.PositionLogprobs] = field(default_factory=list)

    @property
    def essence(self) -> tuple[list[int], str, types_pb2.FinishReason, bytes]:
        """What must be equal whoever answered: tokens, text, finish reason, usage but for what a
        prefix cache spared."""
        counted = types_pb2.Usage()
        counted.CopyFrom(self.last.usage)
        counted.ClearField("cached_tokens")
        usage = counted.SerializeToString(deterministic=True)
        return self.token_ids, self.text, self.last.finish_reason, usage


def request(prompt: list[int], sampling: Sampling, name: str = "") -> inference_pb2.GenerateRequest:
    """A request with token ids."""
    return inference_pb2.GenerateRequest(
        request_id=name,
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=sampling_to_proto(sampling),
    )


async def ask(
    stub: inference_pb2_grpc.InferenceServiceStub,
    message: inference_pb2.GenerateRequest,
    timeout_s: float = 60.0,
) -> Reply:
    """Stream an answer to its end."""
    reply = Reply()
    async for part in stub.Generate(message, timeout=timeout_s):
        reply.token_ids += part.token_ids
        reply.text += part.text
        reply.logprobs += part.logprobs
        reply.last = part
    return reply


def random_request(seed: int, longest: int = 300) -> tuple[list[int], Sampling]:
    """A prompt and a sampling, the same for the same seed."""
    r = random.Random(seed)
    prompt = [r.randrange(3, 32000) for _ in range(r.randint(1, longest))]
    sampling = Sampling(
        max_tokens=r.randint(1, 24),
        min_tokens=0,
        temperature=r.choice([0.0, 0.7, 1.0]),
        top_p=r.choice([1.0, 0.9]),
        top_k=r.choice([0, 40]),
        seed=r.randrange(2**63),
        stop_token_ids=(r.randrange(3, 32000),),
        ignore_eos=r.random() < 0.5,
    )
    return prompt, sampling
