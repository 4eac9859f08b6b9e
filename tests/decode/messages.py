"""What a client asks, and the messages it becomes on either leg."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import Message

from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.protocol.messages import duration, layout_to_proto, prompt_digest
from pd_grpc.v1 import decode_pb2, inference_pb2, layout_pb2, sampling_pb2, types_pb2

M = TypeVar("M", bound=Message)

VOCAB = 1000
EOS = 2
BLOCK = 4
D_EPOCH = 77 << 20
MAX_MODEL_LEN = 64
LAYOUT = KvLayout(
    model="m",
    positions="p",
    block_size=BLOCK,
    groups=(
        KvGroup(
            GroupKind.FULL,
            2,
            (Plane(PlaneKind.K, "uint8", 1, 8), Plane(PlaneKind.V, "uint8", 1, 8)),
        ),
    ),
)
SHARD = layout_pb2.Shard(endpoint="127.0.0.1:9", tp_size=1)


def next_token(tokens: Sequence[int]) -> int:
    """What the engine here says after these tokens; never end of sequence."""
    return zlib.crc32(repr(list(tokens)).encode()) % (VOCAB - 10) + 10


def answer_of(tokens: Sequence[int], n: int) -> list[int]:
    """The `n` tokens that follow."""
    known = list(tokens)
    for _ in range(n):
        known.append(next_token(known))
    return known[len(tokens) :]


@dataclass
class Request:
    """What a client asks, and so what P and D are told of it."""

    transfer_id: str = "t-1"
    prompt: list[int] = field(default_factory=lambda: list(range(100, 106)))
    max_tokens: int = 5
    attempt: int = 1
    generated: list[int] = field(default_factory=list)
    request_id: str = ""
    decode_epoch: int = D_EPOCH

    @property
    def ref(self) -> types_pb2.TransferRef:
        return types_pb2.TransferRef(
            transfer_id=self.transfer_id, attempt=self.attempt, decode_epoch=self.decode_epoch
        )

    @property
    def sampling(self) -> sampling_pb2.SamplingParams:
        return sampling_pb2.SamplingParams(max_tokens=self.max_tokens, temperature=0, seed=7)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def answer(self) -> list[int]:
        """Every token of output that is still to come."""
        return answer_of(self.tokens, self.max_tokens - len(self.generated))

    def allocate(self, session_id: str, **fields: Any) -> decode_pb2.AllocateRequest:
        budget_s, max_wait_s = fields.pop("budget_s", 100.0), fields.pop("max_wait_s", 50.0)
        message = decode_pb2.AllocateRequest(
            session_id=session_id,
            ref=self.ref,
            prompt_tokens=len(self.tokens),
            max_new_tokens=self.max_tokens - len(self.generated),
            prompt_digest=prompt_digest(self.tokens),
            sampling=self.sampling,
            max_wait=duration(max_wait_s),
            kv_needed=True,
            request_id=self.request_id,
        )
        if budget_s is not None:
            message.budget.CopyFrom(duration(budget_s))
        return _with(message, fields)

    def generate(self, local: bool = False, **fields: Any) -> inference_pb2.GenerateRequest:
        message = inference_pb2.GenerateRequest(
            request_id=self.request_id,
            token_ids=inference_pb2.TokenIds(ids=self.prompt),
            sampling=self.sampling,
            generated_token_ids=self.generated,
        )
        if not local:
            message.handoff.CopyFrom(inference_pb2.Handoff(ref=self.ref, decode_name="d"))
        return _with(message, fields)


def _with(message: M, fields: dict[str, Any]) -> M:
    """Fields replaced; a message field is given as a message."""
    for name, value in fields.items():
        message.ClearField(name)
        if hasattr(value, "SerializeToString"):
            getattr(message, name).CopyFrom(value)
        elif isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


def hello(name: str = "p", epoch: int = 10, **fields: Any) -> decode_pb2.Hello:
    message = decode_pb2.Hello(
        instance=types_pb2.Instance(name=name, epoch=epoch, role=types_pb2.ROLE_PREFILL),
        decode_name="d",
        layouts=[layout_to_proto(LAYOUT)],
    )
    return _with(message, fields)


def requests(n: int, **fields: Any) -> Iterator[Request]:
    """Different requests."""
    for i in range(n):
        yield Request(f"t-{i}", prompt=list(range(100 + 20 * i, 106 + 20 * i)), **fields)
