"""One request of a long run: sent, read to its end, and judged against what is right."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
import grpc.aio

from pd_grpc.protocol import rpc
from pd_grpc.protocol.faults import Fault, TransportFault
from pd_grpc.protocol.messages import sampling_to_proto
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import inference_pb2, inference_pb2_grpc, types_pb2

Call: TypeAlias = (
    "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]"
)

OVERDUE_S = 5.0
"""A call that has not ended so long after its budget is over will never end."""


class How(enum.Enum):
    """How a call ended."""

    COMPLETE = "complete"
    LEFT = "left"
    """Its client left."""
    FAULT = "fault"
    NEVER = "never"
    """It had not ended when its time had long been over."""


@dataclass
class Reply:
    """What came of one call. `gap_s` is the longest silence: before the first message, between two,
    or before the end."""

    how: How = How.NEVER
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    fault: Fault | TransportFault | None = None
    usage: tuple[int, int] = (0, 0)
    sent_at: float = 0.0
    ended_at: float = 0.0
    gap_s: float = 0.0


@dataclass(frozen=True)
class Right:
    """The right answer: `token_ids` with the one that ends it, and their text."""

    token_ids: Sequence[int]
    text: str
    prompt_tokens: int


def generate_request(
    name: str, prompt: Sequence[int], as_text: str, sampling: Sampling
) -> inference_pb2.GenerateRequest:
    """As the router takes it; the prompt as text unless that is empty."""
    message = inference_pb2.GenerateRequest(request_id=name, sampling=sampling_to_proto(sampling))
    if as_text:
        message.text = as_text
    else:
        message.token_ids.ids.extend(prompt)
    return message


async def ask(
    stub: inference_pb2_grpc.InferenceServiceStub,
    message: inference_pb2.GenerateRequest,
    budget_s: float,
    leaves_after_s: float | None = None,
) -> Reply:
    """Send it and read the answer; with `leaves_after_s` the client cancels it by then."""
    reply = Reply(sent_at=time.monotonic())
    call = stub.Generate(message, timeout=budget_s)
    leaving = None
    if leaves_after_s is not None:
        leaving = asyncio.get_running_loop().call_later(leaves_after_s, call.cancel)
    reading = asyncio.create_task(_read(call, reply))
    try:
        await asyncio.wait({reading}, timeout=budget_s + OVERDUE_S)
    finally:
        if leaving is not None:
            leaving.cancel()
        overdue = not reading.done()
        if overdue:
            reading.cancel()
            call.cancel()
            await asyncio.wait({reading})
    if overdue:
        reply.how = How.NEVER
    else:
        reading.result()
    return reply


async def _read(call: Call, reply: Reply) -> None:
    heard = reply.sent_at
    complete = False
    try:
        async for part in call:
            now = time.monotonic()
            reply.gap_s, heard = max(reply.gap_s, now - heard), now
            reply.token_ids += part.token_ids
            reply.text += part.text
            if part.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED:
                complete = True
                reply.usage = part.usage.prompt_tokens, part.usage.completion_tokens
        reply.how = How.COMPLETE if complete else How.FAULT
    except grpc.aio.AioRpcError as error:
        reply.how, reply.fault = How.FAULT, rpc.read_error(error)
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
        reply.how = How.LEFT
    finally:
        reply.ended_at = time.monotonic()
        reply.gap_s = max(reply.gap_s, reply.ended_at - heard)


def wrong(reply: Reply, right: Right) -> str:
    """What is wrong with what came, in words; empty when nothing is. Of an answer that did not come
    whole, what came must be its beginning."""
    came, count = reply.token_ids, len(reply.token_ids)
    if came != list(right.token_ids[:count]):
        at = next(
            (
                i
                for i, pair in enumerate(zip(came, right.token_ids, strict=False))
                if pair[0] != pair[1]
            ),
            len(right.token_ids),
        )
        return f"token {at} of {count} is not the right one"
    if reply.how is not How.COMPLETE:
        whole = right.text.startswith(reply.text)
        return "" if whole else f"the text {reply.text!r} does not begin {right.text!r}"
    if count != len(right.token_ids):
        return f"{count} tokens in place of {len(right.token_ids)}, and said to be whole"
    if reply.text != right.text:
        return f"the text is {reply.text!r} in place of {right.text!r}"
    usage = right.prompt_tokens, len(right.token_ids)
    if reply.usage != usage:
        return f"usage of {reply.usage} tokens in place of {usage}"
    return ""
