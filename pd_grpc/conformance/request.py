"""A request of the kit's own, and the messages it becomes on either leg."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import Message

from pd_grpc.protocol.messages import duration, prompt_digest
from pd_grpc.v1 import decode_pb2, inference_pb2, prefill_pb2, sampling_pb2, types_pb2

M = TypeVar("M", bound=Message)

BUDGET_S = 60.0
MAX_WAIT_S = 30.0
_SMALL_VOCAB = 1000
"""No model has fewer tokens, where the size is not told."""


def _greedy() -> sampling_pb2.SamplingParams:
    """Eight tokens, whatever they are: an answer that ends by chance at the first one needs no KV,
    and shows nothing of what most cases are about."""
    return sampling_pb2.SamplingParams(max_tokens=8, temperature=0, seed=7, ignore_eos=True)


@dataclass
class Request:
    """What a client asks, and so what P and D are told of it."""

    transfer_id: str
    prompt: list[int]
    decode_epoch: int = 0
    attempt: int = 1
    generated: list[int] = field(default_factory=list)
    request_id: str = ""
    sampling: sampling_pb2.SamplingParams = field(default_factory=_greedy)

    @property
    def ref(self) -> types_pb2.TransferRef:
        """Its name between P and D."""
        return types_pb2.TransferRef(
            transfer_id=self.transfer_id, attempt=self.attempt, decode_epoch=self.decode_epoch
        )

    @property
    def tokens(self) -> list[int]:
        """Whose KV P sends."""
        return self.prompt + self.generated

    def allocate(self, session_id: str, **fields: Any) -> decode_pb2.AllocateRequest:
        """P's question for blocks; `fields` replace what they name."""
        message = decode_pb2.AllocateRequest(
            session_id=session_id,
            ref=self.ref,
            prompt_tokens=len(self.tokens),
            max_new_tokens=max(1, self.sampling.max_tokens - len(self.generated)),
            prompt_digest=prompt_digest(self.tokens),
            sampling=self.sampling,
            max_wait=duration(MAX_WAIT_S),
            budget=duration(BUDGET_S),
            kv_needed=True,
            request_id=self.request_id,
        )
        return replaced(message, fields)

    def generate(self, *, local: bool = False, **fields: Any) -> inference_pb2.GenerateRequest:
        """The client's leg on D; without a hand-off where D is to prefill it itself."""
        message = inference_pb2.GenerateRequest(
            request_id=self.request_id,
            token_ids=inference_pb2.TokenIds(ids=self.prompt),
            sampling=self.sampling,
            generated_token_ids=self.generated,
        )
        if not local:
            message.handoff.CopyFrom(inference_pb2.Handoff(ref=self.ref))
        return replaced(message, fields)

    def prefill(self, *decodes: str, **fields: Any) -> prefill_pb2.PrefillRequest:
        """The router's question to P, with the control endpoints of the Ds that may have it."""
        message = prefill_pb2.PrefillRequest(
            ref=self.ref,
            request_id=self.request_id,
            token_ids=self.prompt,
            generated_token_ids=self.generated,
            sampling=self.sampling,
            decodes=[prefill_pb2.DecodeTarget(endpoint=endpoint) for endpoint in decodes],
        )
        return replaced(message, fields)


def replaced(message: M, fields: dict[str, Any]) -> M:
    """The message with fields set; None clears one."""
    for name, value in fields.items():
        message.ClearField(name)
        if value is None:
            continue
        if isinstance(value, Message):
            getattr(message, name).CopyFrom(value)
        elif isinstance(value, list | tuple):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


def prompt_of(name: str, tokens: int, vocab_size: int) -> list[int]:
    """`tokens` token ids that no other `name` shares, none of them special in the models known.
    A `vocab_size` of 0 is one that is not told."""
    stream = hashlib.shake_128(name.encode()).digest(4 * tokens)
    vocab_size = vocab_size or _SMALL_VOCAB
    low = min(300, vocab_size // 2)
    return [
        low + int.from_bytes(stream[4 * i : 4 * i + 4], "little") % (vocab_size - low)
        for i in range(tokens)
    ]
