"""What waits for a client that does not read."""

from __future__ import annotations

import asyncio

import pytest

from pd_grpc.decode.actions import TokenOut
from pd_grpc.decode.outbox import TokenOutbox
from pd_grpc.engine.stopping import Finish
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import inference_pb2, types_pb2
from tests.waiting import LIMIT_S

GRPC_DEFAULT_BYTES = 4 << 20
"""The largest message that a client takes which asks for no other limit."""

LARGEST_ID = (1 << 32) - 1


def token(token_id: int) -> TokenOut:
    """With as many log-probabilities as may be asked for, each as large as it can be."""
    one = types_pb2.TokenLogprob(token_id=LARGEST_ID, logprob=-1.5)
    return TokenOut(token_id, types_pb2.PositionLogprobs(chosen=one, top=[one] * 20))


async def read(outbox: TokenOutbox) -> list[inference_pb2.GenerateResponse]:
    messages = []
    while (message := await asyncio.wait_for(outbox.next(), LIMIT_S)) is not None:
        messages.append(message)
    return messages


@pytest.mark.parametrize("count", [1, 4096, 4097, 20_000])
async def test_no_message_is_larger_than_any_client_takes(count: int) -> None:
    outbox = TokenOutbox("decode-0")
    outbox.tokens(tuple(token(i) for i in range(count)))
    outbox.finish(Finish.LENGTH, types_pb2.Usage(completion_tokens=count), None)
    messages = await read(outbox)
    assert max(message.ByteSize() for message in messages) < GRPC_DEFAULT_BYTES
    ids = [i for message in messages for i in message.token_ids]
    assert ids == list(range(count))
    assert all(len(message.logprobs) == len(message.token_ids) for message in messages)
    ends = [bool(message.finish_reason) for message in messages]
    assert ends == [False] * (len(ends) - 1) + [True], "the last alone says the end"


async def test_what_is_left_over_goes_while_the_answer_goes_on() -> None:
    outbox = TokenOutbox("decode-0")
    outbox.tokens(tuple(token(i) for i in range(5000)))
    first = await asyncio.wait_for(outbox.next(), LIMIT_S)
    second = await asyncio.wait_for(outbox.next(), LIMIT_S)
    assert first is not None and second is not None
    assert [*first.token_ids, *second.token_ids] == list(range(5000))
    outbox.fail(Fault(Reason.ENGINE_ERROR, "no more"))
    with pytest.raises(Fault, match="no more"):
        await outbox.next()
