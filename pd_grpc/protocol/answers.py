"""From GenerateResponses to Python values, for clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pd_grpc.protocol.messages import seconds
from pd_grpc.v1 import inference_pb2, types_pb2

STAGES = (
    "route",
    "queue",
    "prepare",
    "allocate",
    "compute",
    "first_token",
    "exposed_send",
    "total",
)
"""Names of the timings of an answer, as `Timings` in the protocol explains them."""

_FINISH_REASONS = {types_pb2.FINISH_REASON_STOP: "stop", types_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True)
class Total:
    """What all choices of a request came to, their prompt counted once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class AnswerEnd:
    """What the last chunk says. `timings_ms` has an entry for each of `STAGES`; `finish_reason` is
    `stop` or `length`. `total` is there on the last chunk of all, where several choices were asked
    for."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timings_ms: Mapping[str, float]
    prefill_instance: str
    decode_instance: str
    total: Total | None = None


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer: tokens, their text, and on the last one how it ended.

    `logprobs` has one entry per token where they were asked for; `choice` is the number of the
    answer, from 0, where there are several.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[types_pb2.PositionLogprobs, ...] = ()
    end: AnswerEnd | None = None
    choice: int = 0


@dataclass
class Answer:
    """A whole answer, of several one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[types_pb2.PositionLogprobs] = field(default_factory=list)
    end: AnswerEnd | None = None

    def add(self, chunk: Chunk) -> None:
        """Append a chunk."""
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.end = chunk.end or self.end


def chunk_of(message: inference_pb2.GenerateResponse) -> Chunk:
    """What a message brings."""
    end = _end_of(message) if message.finish_reason else None
    pieces = tuple(message.token_ids), tuple(message.logprobs)
    return Chunk(message.text, *pieces, end, message.choice)


def _end_of(message: inference_pb2.GenerateResponse) -> AnswerEnd:
    timings = message.timings
    return AnswerEnd(
        finish_reason=_FINISH_REASONS.get(message.finish_reason, "unknown"),
        prompt_tokens=message.usage.prompt_tokens,
        completion_tokens=message.usage.completion_tokens,
        cached_tokens=message.usage.cached_tokens,
        timings_ms={name: 1000 * seconds(getattr(timings, name)) for name in STAGES},
        prefill_instance=message.prefill_instance,
        decode_instance=message.decode_instance,
        total=_total_of(message.total_usage) if message.HasField("total_usage") else None,
    )


def _total_of(usage: types_pb2.Usage) -> Total:
    return Total(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
